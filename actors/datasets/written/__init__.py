"""The data that a run writes itself, offline: one file for each task but the digits (actors/datasets/digits.py)."""
