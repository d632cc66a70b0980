"""The `mobula` command."""

from deploy.cli.commands import app, main

__all__ = ["app", "main"]
