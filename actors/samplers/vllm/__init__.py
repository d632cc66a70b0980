"""Sampling with vLLM."""
