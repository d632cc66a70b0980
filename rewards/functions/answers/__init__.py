"""Reward functions that compare a response with reference answers."""
