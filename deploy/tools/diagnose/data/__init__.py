"""Checks of data and model files: duplicates, leaks, labels, pictures and chat template."""
