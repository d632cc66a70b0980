"""The reward `geospot` with the gazetteer of the installed packages."""

from __future__ import annotations

from functools import cache
from typing import Literal

from mobula.examples.geospot.gazetteer import installed_gazetteer
from mobula.examples.geospot.geospot_reward import Geospot
from mobula.rewards.contract import RewardRequest, Score

try:
    # While the module is imported, which may take `timeouts.start_s`: a call has less time than the gazetteer needs.
    GAZETTEER = installed_gazetteer()
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"geospot needs {error.name!r}: pip install 'mobula[geospot]'") from error


def geospot(request: RewardRequest, *, stage: str, format_weight: float, compat: Literal["none", "vlm_gym"]) -> Score:
    """The score of an answer about a place; `Geospot` has the formula and the options."""
    return _made(stage, format_weight, compat)(request)


@cache
def _made(stage: str, format_weight: float, compat: Literal["none", "vlm_gym"]) -> Geospot:
    return Geospot(GAZETTEER, stage=stage, format_weight=format_weight, compat=compat)
