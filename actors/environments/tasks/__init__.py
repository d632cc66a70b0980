"""The built-in environments and the adapters of libraries, one file each."""
