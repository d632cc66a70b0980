"""From a configuration to running roles."""
