"""The audit of a run: a hash chain of its updates, pushes, checkpoints and restarts, and the verification."""
