"""A child process that runs functions for its parent, each call with a deadline."""
