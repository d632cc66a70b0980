"""Baselines: the same work without Mobula."""
