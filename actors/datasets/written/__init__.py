"""Data sets that a run writes itself."""
