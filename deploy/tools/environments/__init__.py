"""Commands on environments: serve one, play one."""
