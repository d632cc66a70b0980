"""Measures of a learner step: movement of weights and policy, and log-prob gap of fresh responses."""
