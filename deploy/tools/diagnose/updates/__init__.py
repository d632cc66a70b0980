"""Checks of updates: learning rate, clipping, KL, entropy, log-prob gap and trained parts."""
