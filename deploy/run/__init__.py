"""The life of a run, and how a running one is asked."""
