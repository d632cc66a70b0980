"""Commands that let a policy answer outside a run: sample episodes, serve it, compare it."""
