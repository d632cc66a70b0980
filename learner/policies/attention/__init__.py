"""Attention of learner and reference, and rows without padding."""
