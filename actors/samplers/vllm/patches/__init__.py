"""Replacements of private parts of vLLM."""
