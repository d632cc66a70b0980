"""Scores recorded responses with the rewards of a run, without the run."""
