"""Checks of machines and checkpoints."""
