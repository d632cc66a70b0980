"""Mobula: reinforcement learning of vision-language and visual generative models on Ray."""

from pathlib import Path

_here = Path(__file__).resolve().parent
if not (_here / "cluster").is_dir():  # in a checkout, whose top-level directories are the sub-packages
    __path__.append(str(_here.parents[2]))
