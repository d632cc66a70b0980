"""Hosts of environments: this process, subprocesses, Ray actors, or a server."""
