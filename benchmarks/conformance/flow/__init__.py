"""Measures, for every family of flow models, whether sampler, learner and plain diffusers agree."""
