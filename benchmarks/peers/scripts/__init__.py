"""Each peer's side of a work, run in the environment of that peer."""
