"""How much memory a run takes, before anything starts."""
