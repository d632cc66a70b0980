"""Errors for mistakes in a configuration; a module of its own, so that commands without one load no YAML."""

from __future__ import annotations


class ConfigError(ValueError):
    """The configuration is unfit to run; the message says what is wrong, what was got and what to do, a line each."""
