"""Families of flow models, by the pipeline class that model_index.json of a diffusers checkpoint names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mobula.learner.policies.flow.families.base import FlowFamily
from mobula.learner.policies.flow.families.pipelines import (
    CosmosPredict2,
    CosmosPredict25,
    Flux,
    QwenImage,
    Sana,
    StableDiffusion3,
    Wan,
)

INDEX = "model_index.json"
TRANSFORMER = "transformer"  # the folder of the network that is trained, and its name in a pipeline

FAMILIES: dict[str, FlowFamily] = {
    "StableDiffusion3Pipeline": StableDiffusion3(),
    "FluxPipeline": Flux(),
    "QwenImagePipeline": QwenImage(),
    "SanaPipeline": Sana(),
    "WanPipeline": Wan(),
    "Cosmos2TextToImagePipeline": CosmosPredict2(),
    "Cosmos2_5_PredictBasePipeline": CosmosPredict25(),
}

_TAKES_IMAGES = "it is conditioned on an image or video as well, and a row of a flow model has a text alone"
REFUSED: dict[str, str] = {
    "WanImageToVideoPipeline": _TAKES_IMAGES,
    "WanVideoToVideoPipeline": _TAKES_IMAGES,
    "WanVACEPipeline": _TAKES_IMAGES,
    "FluxKontextPipeline": _TAKES_IMAGES,
    "QwenImageEditPipeline": _TAKES_IMAGES,
    "Cosmos2VideoToWorldPipeline": _TAKES_IMAGES,
    "CosmosTextToWorldPipeline": "Cosmos Predict 1 predicts noise on EDM levels; use Cosmos Predict 2 or 2.5",
    "SanaSprintPipeline": "a model of one or two distilled steps has no schedule of stochastic steps",
    "StableDiffusionPipeline": "it predicts noise and is no flow model",
    "StableDiffusionXLPipeline": "it predicts noise and is no flow model",
    "NextStepPipeline": "NextStep-1 is neither in diffusers nor in transformers, and remote code is not run",
}
"""Pipeline class -> why there is no family of it."""


def flow_family_at(folder: Path) -> FlowFamily:
    """The family of the diffusers checkpoint in `folder`."""
    index = pipeline_index(folder)
    name = index["_class_name"]
    if name not in FAMILIES:
        reason = f" ({REFUSED[name]})" if name in REFUSED else ""
        raise ValueError(
            f"policy.model={folder} is a {name}, which is not supported{reason}: choose a checkpoint of "
            f"{', '.join(sorted(FAMILIES))}"
        )
    if any(index.get("transformer_2", ())):
        raise ValueError(
            f"policy.model={folder} has two transformers, one for each half of the noise levels (Wan 2.2), of which a "
            "policy can train one: choose a checkpoint of Wan 2.1"
        )
    return FAMILIES[name]


def pipeline_index(folder: Path) -> dict[str, Any]:
    """The content of model_index.json: the pipeline's class, and [library, class] of each part."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        index["_class_name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"policy.model={folder} is no diffusers checkpoint ({INDEX} cannot be used: {error}): name a folder that "
            "a pipeline was saved to"
        ) from error
    return index
