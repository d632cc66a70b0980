"""Worker processes of a private cluster on CPU, forked from a process with their imports."""
