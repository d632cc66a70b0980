"""Adapters of other libraries and protocols, one file each."""
