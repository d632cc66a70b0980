"""Workers of every role: pools, restarts, supervision, status, scaling and colocation."""
