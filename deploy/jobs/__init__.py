"""Runs as jobs of a Ray cluster: submitted, followed, stopped and listed."""
