"""The audit of a run: a hash chain of what was trained, pushed, saved and restarted, and its verification."""
