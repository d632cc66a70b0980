"""Scoring of recorded responses by the rewards of a run, without the run."""
