"""Conversion between the messages of the `tinker` client and the calls of the learner and the engines."""
