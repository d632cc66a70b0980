"""Offline jobs: training of the learner's ranks on rows of a dataset."""
