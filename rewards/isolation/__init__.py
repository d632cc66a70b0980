"""Runs reward functions with a deadline, in separate processes."""
