"""Where records go. Import each sink from its own module: some of them load heavy libraries."""
