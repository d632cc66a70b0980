"""Generative judges: what a model is asked about a response, and how its reply becomes a score."""
