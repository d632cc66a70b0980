"""The commands besides training."""
