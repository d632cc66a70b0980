"""Rows with what is preferred to what."""
