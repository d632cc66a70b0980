"""Generative judges: conversations about a response, and scores read from the replies."""
