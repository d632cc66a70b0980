"""Rehearsals: the real driver code of a configuration with simulated engines and learner ranks, in virtual time."""
