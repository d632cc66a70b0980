"""Tiny models of random weights that hear."""
