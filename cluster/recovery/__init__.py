"""Checkpoints, resume, lost-group regeneration and restarts of lost ranks."""
