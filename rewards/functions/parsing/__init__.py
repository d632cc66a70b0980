"""Parsers for answers, boxes and JSON in a response."""
