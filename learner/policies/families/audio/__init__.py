"""Families whose prompts hold sounds."""
