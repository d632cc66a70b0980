"""Readers of preference pairs."""
