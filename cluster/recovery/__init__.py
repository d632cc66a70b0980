"""Checkpoints, resume, lost-group regeneration and the restartable learner."""
