"""Registry of the reward functions: builds a function from its name and options."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from mobula.cluster.user_code import check_options, did_you_mean, file_at, is_user_code, load
from mobula.rewards.contract import BatchRewardFunction, RewardFunction
from mobula.rewards.functions.plugin import BATCH, CALL, Plugin, users_signature
from mobula.rewards.isolation.process import Isolated
from mobula.rewards.tools import Tools

BUILT_IN: Mapping[str, str] = {  # name -> factory, imported on demand: models import torch
    "aerorl_contains": "mobula.examples.aerorl.aerorl:AeroRLContains",
    "aerorl_cost": "mobula.examples.aerorl.aerorl:AeroRLCost",
    "aerorl_format": "mobula.examples.aerorl.aerorl:AeroRLFormat",
    "aerorl_grounding": "mobula.examples.aerorl.aerorl:AeroRLGrounding",
    "aerorl_verifier": "mobula.examples.aerorl.aerorl:AeroRLVerifier",
    "aesthetic": "mobula.rewards.models.image_scores:Aesthetic",
    "anls": "mobula.rewards.functions.short_answers:Anls",
    "clip_score": "mobula.rewards.models.image_scores:ClipScore",
    "cost": "mobula.rewards.functions.response_form:Cost",
    "environment": "mobula.rewards.functions.plugin:EnvironmentReward",
    "exact_match": "mobula.rewards.functions.short_answers:ExactMatch",
    "format": "mobula.rewards.functions.response_form:Format",
    "grounding": "mobula.rewards.functions.grounding:Grounding",
    "http": "mobula.rewards.http.client:HttpReward",
    "image_change": "mobula.rewards.functions.images:ImageChange",
    "iou": "mobula.rewards.functions.grounding:Iou",
    "jpeg_size": "mobula.rewards.functions.response_form:JpegSize",
    "judge": "mobula.rewards.models.server_judge:Judge",
    "keywords": "mobula.rewards.functions.short_answers:Keywords",
    "language": "mobula.rewards.functions.language:Language",
    "math_answer": "mobula.rewards.functions.math_answer:MathAnswer",
    "multiple_choice": "mobula.rewards.functions.short_answers:MultipleChoice",
    "ocr": "mobula.rewards.functions.ocr:Ocr",
    "overlong": "mobula.rewards.functions.response_form:Overlong",
    "pick_score": "mobula.rewards.models.image_scores:PickScore",
    "reflection": "mobula.rewards.functions.response_form:Reflection",
    "relaxed_accuracy": "mobula.rewards.functions.short_answers:RelaxedAccuracy",
    "reward_model": "mobula.rewards.models.reward_model:RewardModel",
    "script_share": "mobula.rewards.functions.response_form:ScriptShare",
    "shapes_check": "mobula.rewards.functions.images:ShapesCheck",
    "true_false": "mobula.rewards.functions.short_answers:TrueFalse",
    "vllm_judge": "mobula.rewards.models.vllm_judge:VllmJudge",
}
READ_LENGTHS = ("cost", "http", "overlong")
"""Functions that read the number of tokens of a response, as a user's function may."""
EXTRAS: Mapping[str, str] = {"language": "language", "ocr": "ocr"}  # name -> extra that installs its dependencies


def build_function(name: str, options: Mapping[str, Any], tools: Tools) -> RewardFunction | BatchRewardFunction:
    """Builds the reward function `name`.

    A built-in function is built by `factory(tools, **options)`. A user's function, `module:function` or
    `path/to/file.py:function`, is called as `function(request, **options)` in an isolated process, never in this one.
    """
    if is_user_code(name):
        signature = check_users_function(name, options, tools.isolated)
        return Plugin(tools, name, options, takes_batch=next(iter(signature.parameters)) == BATCH)
    if name not in BUILT_IN:
        known = f"one of {', '.join(BUILT_IN)}, module:function or path/to/file.py:function"
        raise ValueError(f"there is no reward function {name!r}{did_you_mean(name, BUILT_IN)}: use {known}")
    try:
        factory = load(BUILT_IN[name])
    except ValueError as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            raise _not_installed(name, error.__cause__) from error
        raise
    check_options(name, inspect.signature(factory), options)
    try:
        return factory(tools, **options)
    except ModuleNotFoundError as error:  # a constructor may import an optional package
        raise _not_installed(name, error) from error


def _not_installed(name: str, error: ModuleNotFoundError) -> ValueError:
    needs = f"reward function {name!r} needs {error.name!r}, which is not installed"
    return ValueError(f"{needs}: pip install 'mobula[{EXTRAS[name]}]'" if name in EXTRAS else needs)


def check_users_function(name: str, options: Mapping[str, Any], isolated: Isolated) -> inspect.Signature:
    """Imports a user's function in the isolated processes and checks the options against its parameters, which it
    returns."""
    path = name.rpartition(":")[0]
    if path.endswith(".py"):
        try:
            file_at(path)
        except ValueError as error:
            raise ValueError(f"reward function {name!r}: {error}: give a path every node has") from error
    signature = users_signature(name, isolated)
    try:
        check_options(name, signature, options)
    except ValueError as error:
        raise ValueError(f"{error}; {CALL}") from error
    return signature
