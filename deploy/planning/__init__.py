"""Estimates the memory of a run before anything starts."""
