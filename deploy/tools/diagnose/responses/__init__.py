"""Checks of responses: length, ends, variety, and agreement with the labels."""
