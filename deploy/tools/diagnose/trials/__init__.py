"""Trials of `mobula diagnose --deep`: short computations of the learner on recorded groups."""
