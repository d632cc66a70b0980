"""Rollouts: dispatch, admission, in-flight requests, evaluation and the rollout pool."""
