"""Flow models as policies over denoising steps."""
