"""Reward functions with a deadline, in processes of their own."""
