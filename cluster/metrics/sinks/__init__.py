"""Sinks of metrics. Import each sink from its own module: some of them load heavy libraries."""
