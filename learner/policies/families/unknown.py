"""Vision-language models without a family file: uses the model's forward pass, with a parity check at start."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils import ModelOutput

from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.batch import MediaBatch, TokenBatch
from mobula.learner.policies.device_copies import on_device
from mobula.learner.policies.families.vision import VisionFamily, image_settings, method

BLANK_SIDE = 56  # pixels of the image that a batch without images shows the tower
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
GRIDS = ("image_grid_thw", "image_sizes")  # arguments of forward() that say how large each image is


class UnknownFamily(VisionFamily):
    """A model that transformers loads as image-text-to-text and whose base takes `mm_encoder_outputs`.

    Every argument of forward() that depends on images is passed by name. This may not be enough, so a run compares
    engine and learner before its first step and is refused if they differ.
    """

    model_types = ()
    media_tokens = ""  # see `media_token_ids`
    parts = {}
    needs_gate = True
    shares_prefixes = False  # its positions may depend on the whole row
    padded_because = "it has no family file, and its decoder may not keep rows apart"

    @classmethod
    def takes(cls, config: PreTrainedConfig) -> bool:
        """Returns whether this class may support a model with this config."""
        return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and hasattr(config, "image_token_id")

    def media_token_ids(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        """Returns all special tokens that contain the name of a medium."""
        added = tokenizer.added_tokens_decoder.items()
        about = re.compile("image|img|video|vision|audio|frame|row_|col_", re.IGNORECASE)
        return tuple(i for i, token in added if token.special and about.search(token.content))

    def refuse_unfit(self, processor: ProcessorMixin, config: PreTrainedConfig) -> None:
        if type(processor).replace_image_token is ProcessorMixin.replace_image_token:
            raise ValueError(
                f"policy.model is of type {config.model_type}, which has no family file, and its "
                f"{type(processor).__name__} does not say what an image becomes in a prompt: choose a supported type"
            )
        if self.placeholder_id(config) not in self.media_token_ids(processor.tokenizer):
            raise ValueError(
                f"policy.model is of type {config.model_type}, which has no family file, and the token of its images "
                f"({self.placeholder_id(config)}) is not a special one named after them: choose a supported type"
            )

    def process(self, processor: ProcessorMixin, image: Image.Image) -> dict[str, np.ndarray]:
        made = processor.image_processor(images=[image], return_tensors="pt", **image_settings(processor))
        tensors = {name: value.numpy() for name, value in made.items() if isinstance(value, Tensor) and value.dim()}
        return {"pixel_values": tensors.pop("pixel_values"), **tensors}

    def encode_shared(
        self,
        core: PreTrainedModel,
        config: PreTrainedConfig,
        batch: TokenBatch,
        ranks: SequenceRanks | None,
        inputs: Mapping[str, Tensor],
        media: Sequence[MediaBatch],
    ) -> ModelOutput:
        """Encodes all media on every rank: the share of an image in the tensors is unknown."""
        return self.encode(core, inputs)

    def encode(self, core: PreTrainedModel, inputs: Mapping[str, Tensor]) -> ModelOutput:
        taken = inspect.signature(inspect.unwrap(method(core, "get_image_features"))).parameters
        device = inputs["pixel_values"].device  # grids are on the host
        return super().encode(core, {name: tensor.to(device) for name, tensor in inputs.items() if name in taken})

    def decoder_inputs(self, core: PreTrainedModel, batch: TokenBatch, token_types: Tensor) -> dict[str, Any]:
        taken = inspect.signature(type(core).forward).parameters
        if "mm_encoder_outputs" not in taken:
            raise ValueError(
                f"policy.model is a {type(core).__name__}, whose forward() takes no mm_encoder_outputs: choose a "
                "checkpoint of a supported type"
            )
        if "rope_deltas" in vars(core):  # of the batch before
            vars(core)["rope_deltas"] = None
        device = batch.input_ids.device
        inputs = {name: token_types.to(device) for name in TOKEN_TYPES if name in taken}
        order = list(batch.media.order)
        for name in GRIDS:
            if name in taken and name in batch.media.inputs:
                inputs[name] = batch.media.inputs[name][order].to(device)
        return inputs

    def generate_inputs(self, model: PreTrainedModel, token_types: Tensor) -> dict[str, Tensor]:
        taken = inspect.signature(type(self.core(model)).forward).parameters
        return {name: token_types for name in TOKEN_TYPES if name in taken}

    def blank_image(self, config: PreTrainedConfig, device: torch.device) -> dict[str, Tensor]:
        processor = AutoProcessor.from_pretrained(config.name_or_path, trust_remote_code=False)
        made = self.process(processor, Image.new("RGB", (BLANK_SIDE, BLANK_SIDE)))
        return {name: on_device(array, device) for name, array in made.items()}
