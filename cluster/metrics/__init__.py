"""Metrics of a run, their sinks, and the report that is made from them."""
