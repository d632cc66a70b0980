"""Rows of a data set as the learner takes them: examples, how ranks share them, and their term beside an RL step."""
