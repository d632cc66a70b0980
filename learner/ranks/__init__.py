"""Processes that train one model together: how they meet, and how the driver calls all of them at once."""
