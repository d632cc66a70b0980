"""Offline jobs: the learner's ranks on rows of a data set."""
