"""Mobula: reinforcement learning of vision-language and visual generative models on Ray.

The names in `__all__` are the Python interface; `mobula.deploy.api` documents them. They are imported when they are
used first, because every process of a run imports this package.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mobula.deploy.api import Run, diagnose, evaluate, export, load_config, plan, train

__all__ = ["Run", "diagnose", "evaluate", "export", "load_config", "plan", "train"]

_here = Path(__file__).resolve().parent
if not (_here / "cluster").is_dir():  # in a checkout, whose top-level directories are the sub-packages
    __path__.append(str(_here.parents[2]))


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mobula' has no attribute {name!r}")
    from mobula.deploy import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return __all__
