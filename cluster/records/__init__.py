"""Records that roles exchange: prompts, trajectories, media, and their Arrow form."""
