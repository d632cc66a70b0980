"""Vision-language models of transformers: one vision call on unique images, placed by the model's own forward()."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from inspect import signature
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin
from transformers.utils import ModelOutput

from mobula.configs.schema.data import VideoConfig
from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.base import on_device
from mobula.learner.policies.batch import MediaBatch, TokenBatch
from mobula.learner.policies.families.base import Clip, ImageFamily, Size

MODALITIES = ("image", "video")  # the n-th modality has token type n
Encoded = dict[str, ModelOutput]  # modality -> features


def takes_encoded_images(core: type[nn.Module]) -> bool:
    """Whether forward() of this class has `mm_encoder_outputs`; older ones ignore it, as any unknown argument."""
    return "mm_encoder_outputs" in signature(core.forward).parameters


class VisionFamily(ImageFamily):
    """A model whose base takes `mm_encoder_outputs`: the results of `get_image_features`.

    Each unique image of a batch is encoded once, and its features are repeated for every placeholder run of the image.
    The model inserts features, and other image inputs of its decoder, at the placeholder tokens, row by row.
    """

    def expansion(self, processor: ProcessorMixin, size: Size) -> np.ndarray:
        """Runs the processor on a black image of this size."""
        blank = Image.new("RGB", size)
        images = processor.image_processor(images=[blank], return_tensors="pt", **image_settings(processor))
        text = processor.replace_image_token(images, 0)
        return np.array(processor.tokenizer(text, add_special_tokens=False).input_ids, dtype=np.int32)

    def process(self, processor: ProcessorMixin, image: Image.Image) -> dict[str, np.ndarray]:
        made = processor.image_processor(images=[image], return_tensors="pt", **image_settings(processor))
        return {name: made[name].numpy() for name in self.image_inputs}

    image_inputs: tuple[str, ...] = ("pixel_values",)  # the arguments of `get_image_features`

    def hidden_states(self, model: PreTrainedModel, batch: TokenBatch, ranks: SequenceRanks | None = None) -> Tensor:
        core, ids = self.core(model), batch.host_ids.copy()
        if not takes_encoded_images(type(core)):
            raise ValueError(
                f"{type(core).__name__} of transformers {transformers.__version__} would leave out the images, which "
                "are encoded before its forward(): install transformers 5.18 or newer"
            )
        kinds = np.zeros_like(ids)  # [B, S]; on the host, which would wait for the device at every check
        for number, placeholder in enumerate(self.placeholder_ids(model.config), start=1):
            is_placeholder = (ids == placeholder) & batch.in_media
            _refuse_stray(ids, is_placeholder, placeholder, batch)
            # The last token of a row is never looked at: it may be any but a placeholder outside of media.
            ids[(ids == placeholder) & ~is_placeholder] = 0
            kinds[is_placeholder] = number
        kinds[(kinds == 1) & batch.in_video] = 2  # if videos have the placeholder of images
        encoded = self.encode_all(core, batch, ranks)
        for number, modality in enumerate(MODALITIES, start=1):
            check_count(encoded.get(modality), int((kinds == number).sum()))
        types = torch.from_numpy(kinds)
        taken = self.as_taken(encoded, types)
        extra = self.decoder_inputs(core, batch, types)
        input_ids = on_device(ids, batch.input_ids.device)
        return core(input_ids=input_ids, mm_encoder_outputs=taken, **extra, use_cache=False).last_hidden_state

    def placeholder_ids(self, config: PreTrainedConfig) -> tuple[int, ...]:
        """The placeholder of images, and that of videos if the family has another one for them."""
        return (self.placeholder_id(config),)

    def encode_all(self, core: PreTrainedModel, batch: TokenBatch, ranks: SequenceRanks | None) -> Encoded:
        """Returns modality -> features at all placeholders of a batch, in exactly one call of the vision tower."""
        if not batch.media.inputs:
            return {"image": self.encode_nothing(core, batch.input_ids.device)}
        encoded = self.encode_shared(core, batch, ranks, batch.media.inputs, [batch.media])
        return {"image": placed(encoded, batch.media)}

    def as_taken(self, encoded: Encoded, token_types: Tensor) -> Encoded:
        """The features in the form that the model's forward() takes; `token_types` as in `decoder_inputs`."""
        return encoded

    def encode_nothing(self, core: PreTrainedModel, device: torch.device) -> ModelOutput:
        """Returns features of a blank image, none of which is inserted.

        Modules are entered and inputs have gradients as in a batch with images: ZeRO-3 gathers parameters in the order
        of both passes, and the order must be equal on all ranks.
        """
        return changed(self.encode(core, self.blank_image(core.config, device)), _none_of)

    def encode_shared(
        self,
        core: PreTrainedModel,
        batch: TokenBatch,
        ranks: SequenceRanks | None,
        inputs: Mapping[str, Tensor],
        media: Sequence[MediaBatch],
    ) -> ModelOutput:
        """Returns the features of `inputs`, the concatenated tensors of all `media`.

        Ranks of sequence parallelism encode a share of the media each and gather the features.
        """
        if ranks is None:
            return self.encode(core, inputs)
        num_parts = [num for one in media for num in one.num_parts]
        spans, ids = [span for one in media for span in one.spans], self.placeholder_ids(core.config)
        num_tokens = [int(np.isin(batch.host_ids[row, start:end], ids).sum()) for row, start, end in spans]
        shares = ranks.dealt(num_parts)
        if own := shares[ranks.rank]:
            encoded = self.encode(core, _chosen(inputs, num_parts, own))
        else:
            encoded = self.encode_nothing(core, batch.input_ids.device)
        return changed(encoded, lambda features: _gathered(features, num_tokens, shares, ranks))

    def core(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model without its output embeddings."""
        return submodel(model, "model")

    def encode(self, core: PreTrainedModel, inputs: Mapping[str, Tensor]) -> ModelOutput:
        """Returns the features of unique images, before they are repeated."""
        return method(core, "get_image_features")(**self.forward_inputs(inputs), return_dict=True)

    def decoder_inputs(self, core: PreTrainedModel, batch: TokenBatch, token_types: Tensor) -> dict[str, Tensor]:
        """Returns positions and masks that replace the model's own; `token_types` [B, S], on the host, is 1 at
        placeholders of images and 2 at those of videos."""
        return {}

    @abstractmethod
    def blank_image(self, config: PreTrainedConfig, device: torch.device) -> dict[str, Tensor]:
        """The smallest image that the vision tower takes, by the names of `process`."""


def submodel(model: nn.Module, name: str) -> PreTrainedModel:
    """Returns a submodule that is a transformers model."""
    part = model.get_submodule(name)
    if not isinstance(part, PreTrainedModel):
        raise TypeError(f"{name} of {type(model).__name__} is a {type(part).__name__} and no model of transformers")
    return part


def method(model: nn.Module, name: str) -> Callable[..., Any]:
    """A method of the model's own class; the types of nn.Module hold parameters and submodules alone."""
    own = getattr(model, name)
    if not callable(own):
        raise TypeError(f"{name} of {type(model).__name__} is no method")
    return own


def image_settings(processor: ProcessorMixin) -> dict[str, Any]:
    """The settings that a processor calls its image processor with, where these differ from the checkpoint's: several
    released checkpoints leave it to their processor to cut images into tiles."""
    defaults: Mapping[str, Mapping[str, Any]] = vars(processor.valid_processor_kwargs)["_defaults"]
    return dict(defaults.get("images_kwargs", {}))


Features = Tensor | Sequence[Tensor]  # of all media in one tensor, or one tensor each


def changed(encoded: ModelOutput, change: Callable[[Features], Features]) -> ModelOutput:
    """Returns a tower's output with changed features, of its last layer and of the layers that the decoder reads."""
    output = copy(encoded)
    output["pooler_output"] = change(encoded["pooler_output"])
    if "deepstack_features" in encoded:
        output["deepstack_features"] = [change(layer) for layer in encoded["deepstack_features"]]
    return output


def placed(encoded: ModelOutput, media: MediaBatch) -> ModelOutput:
    """Repeats features of unique media for all their positions, in batch order."""
    return changed(encoded, lambda features: _in_order(features, media))


def interleaved(encoded: Mapping[str, ModelOutput], token_types: Tensor) -> Tensor:
    """[N, H]: features of images and videos in the order of their places, for a model with one token for both."""
    kinds = token_types[token_types > 0]  # [N], row by row, on the host
    found = {MODALITIES.index(modality) + 1: _flat(output["pooler_output"]) for modality, output in encoded.items()}
    [some, *_] = found.values()
    features = some.new_zeros(len(kinds), some.shape[-1])
    for number, own in found.items():
        places = on_device((kinds == number).nonzero()[:, 0].numpy(), features.device)
        features = features.index_copy(0, places, own)
    return features


def _flat(features: Features) -> Tensor:
    parts = [features] if isinstance(features, Tensor) else features
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _chosen(inputs: Mapping[str, Tensor], num_parts: list[int], chosen: list[int]) -> dict[str, Tensor]:
    """The tensors of some of the media: each has its parts of axis 0, or one row where there is one a medium."""
    split = {name: tensor.split(num_parts if len(tensor) == sum(num_parts) else 1) for name, tensor in inputs.items()}
    return {name: torch.cat([parts[i] for i in chosen]) for name, parts in split.items()}


def _gathered(own: Features, num_tokens: list[int], shares: list[list[int]], ranks: SequenceRanks) -> Features:
    """Gathers the features of each rank's share to the features of all media, in order and in the same form."""
    flat = ranks.features(_flat(own), [sum(num_tokens[i] for i in share) for share in shares])
    order = [i for share in shares for i in share]
    found = dict(zip(order, flat.split([num_tokens[i] for i in order]), strict=True))
    features = [found[i] for i in range(len(order))]
    return torch.cat(features).view(-1, *own.shape[1:]) if isinstance(own, Tensor) else features


def _none_of(features: Features) -> Features:
    """Reduces features of an image to zero rows, through which gradients are zeros."""
    return features[:0] if isinstance(features, Tensor) else [part[:0] for part in features]


def _in_order(features: Features, media: MediaBatch) -> Features:
    """Models give one tensor an image, or all parts (tiles) of all images in one."""
    if not isinstance(features, Tensor):
        return [features[i] for i in media.order]
    parts = features.split(list(media.num_parts))
    return torch.cat([parts[i] for i in media.order])


def check_count(encoded: ModelOutput | None, num_placeholders: int) -> None:
    """Raises: ValueError: the numbers of placeholders and embeddings differ."""
    features = () if encoded is None else encoded["pooler_output"]
    rows = [features] if isinstance(features, Tensor) else features
    num_embeddings = sum(tensor.numel() // tensor.shape[-1] for tensor in rows)
    if num_embeddings != num_placeholders:
        raise ValueError(
            f"the recorded media spans hold {num_placeholders} placeholders but the vision tower made "
            f"{num_embeddings} embeddings: prompts were processed with another model's processor"
        )


def refuse_long(clip: Clip, num_tokens: int, limits: VideoConfig) -> None:
    """Raises: ValueError: a video has too many tokens; for families with a fixed number of tokens per frame."""
    if num_tokens > limits.max_tokens:
        raise ValueError(
            f"its {len(clip.timestamps)} frames take {num_tokens} tokens, however small they are, and "
            f"data.video.max_tokens is {limits.max_tokens}: lower data.video.max_frames or raise it"
        )


def _refuse_stray(ids: np.ndarray, is_placeholder: np.ndarray, placeholder: int, batch: TokenBatch) -> None:
    """Refuses placeholders without a recorded image: the model would insert an image there."""
    is_stray = (ids == placeholder) & ~is_placeholder
    is_seen = np.arange(ids.shape[1]) < np.array(batch.row_lengths)[:, None] - 1
    if (is_stray & is_seen).any():
        raise ValueError(
            f"a row holds the placeholder {placeholder} outside of its recorded images and videos: it is banned from "
            "sampling, so remove it from the responses of your data"
        )
