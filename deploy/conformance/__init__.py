"""Measures, for every model family, how far engine and learner are apart."""
