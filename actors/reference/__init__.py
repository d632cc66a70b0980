"""The reference scorers and their pool."""
