"""Checks of rewards: their trend, what the parser finds, groups, components and signs of exploitation."""
