"""Simulated parts of a rehearsal: virtual time, engines, workers and faults."""
