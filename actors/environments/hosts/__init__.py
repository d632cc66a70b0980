"""Hosts of environments: in this process, in processes that can be killed, or on a server."""
