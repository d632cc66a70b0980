"""Adapters of other libraries and protocols."""
