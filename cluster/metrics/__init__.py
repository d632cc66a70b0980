"""Metrics of a run, their sinks, and the report."""
