"""Measures the log-prob difference between engine and learner for every model family."""
