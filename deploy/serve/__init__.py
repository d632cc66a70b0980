"""Servers of policies, rewards and environments."""
