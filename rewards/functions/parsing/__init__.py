"""Answers, boxes and JSON read out of a response."""
