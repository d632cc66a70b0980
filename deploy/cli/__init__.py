"""The `mobula` command."""

import logging

# transformers imports torchao where it is installed, and torch warns of torchao's own classes on every command.
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)

from mobula.deploy.cli.commands import app, main  # noqa: E402  (the level is set before the import)

__all__ = ["app", "main"]
