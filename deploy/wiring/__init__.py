"""Builds the roles of a run from its configuration."""
