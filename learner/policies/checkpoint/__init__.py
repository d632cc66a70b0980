"""Checkpoints of token policies on disk: the names and dtypes in their files, and how policies are written."""
