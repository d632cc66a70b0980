"""FlowCheckpoint: the parts of a flow model in the layout of diffusers, each loaded where it is needed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from accelerate import init_empty_weights
from diffusers import AutoModel, DiffusionPipeline
from diffusers.models.modeling_utils import ModelMixin, no_init_weights
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from torch import Tensor, nn

from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.weight_sync.manifest import NETWORKS, stored_tensors
from mobula.learner.policies.checkpoint import SavedDtypes, StoredWeights, write_weights
from mobula.learner.policies.flow.families import TRANSFORMER, flow_family_at, pipeline_index
from mobula.learner.policies.flow.family import Config, Schedule, filled
from mobula.learner.policies.flow.policy import Denoising, LatentSequence, canary_actions

VAE, SCHEDULER = "vae", "scheduler"
WEIGHTS_STEM, MAX_FILE_SIZE = "diffusion_pytorch_model", "10GB"  # as in diffusers
DENOISING = (*NETWORKS, VAE, SCHEDULER)  # parts for sampling: prompts come encoded


class TwoTransformers(nn.Module):
    """The two networks of Wan 2.2: one for times from `boundary` on, and one for times below. A pass may have both."""

    def __init__(self, networks: Mapping[str, ModelMixin], boundary: float) -> None:
        super().__init__()
        for name, network in networks.items():
            self.add_module(name, network)
        self.config: Config = networks[TRANSFORMER].config
        self._no_split_modules = networks[TRANSFORMER]._no_split_modules
        self._boundary = boundary

    def forward(self, *, return_dict: bool, **inputs: Tensor) -> tuple[Tensor]:
        """In training mode both networks are called, since ranks that share parameters gather them together."""
        is_high = inputs["timestep"] >= self._boundary
        outputs, order = [], []
        for name, chosen in zip(NETWORKS, (is_high, ~is_high), strict=True):
            rows = chosen.nonzero()[:, 0]
            if len(rows) or self.training:
                used = filled(rows if len(rows) else rows.new_zeros(1))
                given = {key: value[used] for key, value in inputs.items()}
                outputs.append(self.get_submodule(name)(**given, return_dict=return_dict)[0][: len(rows)])
                order.append(rows)
        return (torch.cat(outputs)[torch.cat(order).argsort()],)


class FlowCheckpoint:
    """A checkpoint folder or hub name whose family is supported."""

    def __init__(self, source: str) -> None:
        self.folder = Path(source) if Path(source).is_dir() else _downloaded(source)
        self.family = flow_family_at(self.folder)
        self._index = pipeline_index(self.folder)
        self._boundary: float | None = self._index.get("boundary_ratio")  # noise level where the first network ends
        self.networks = NETWORKS if self._boundary is not None else (TRANSFORMER,)
        needed = [name for name in self._parts() if name not in self.family.placeholders]
        missing = [name for name in needed if not (self.folder / name).is_dir()]
        if missing:
            raise ValueError(
                f"policy.model={self.folder} has no folder {', '.join(missing)}, which its model_index.json names: "
                "copy or download the whole checkpoint"
            )

    @property
    def weights_folder(self) -> Path:
        """The folder of the trained network; with two networks, the folder above both."""
        return self.folder if self._boundary is not None else self.folder / TRANSFORMER

    def unread_transformer(self) -> tuple[nn.Module, StoredWeights]:
        """Returns the trained network, with parameters on the meta device in float32, and its weights."""
        with no_init_weights(), init_empty_weights(include_buffers=False):
            model = self._joined({name: self._unread(name) for name in self.networks})
        folder = self.weights_folder
        return model.eval(), StoredWeights(folder, {name: name for name in stored_tensors(folder)}, model)

    def transformer(self, dtype: torch.dtype) -> nn.Module:
        """The trained network with its weights, on the CPU."""
        return self._joined({name: self._part(name, dtype) for name in self.networks})

    @property
    def encoders(self) -> list[str]:
        """Names of the networks that encode a prompt."""
        parts = [name for name in self._parts() if name not in DENOISING and name not in self.family.placeholders]
        return [name for name in parts if (self.folder / name / "config.json").is_file()]

    def described(self, name: str) -> nn.Module:
        """A network of the pipeline with parameters on the meta device, of which config.json alone is read."""
        library, kind = self._index[name]
        with torch.device("meta"):
            if library == "diffusers":
                return self._unread(name)
            return getattr(transformers, kind)(transformers.AutoConfig.from_pretrained(self.folder / name))

    def encoded_shapes(self, denoising: Denoising, max_tokens: int) -> dict[str, tuple[int, ...]]:
        """Input of the network -> shape of one row of an encoded prompt."""
        latents, model = self.latent_shape(denoising), self._config(self.networks[0])
        if self.family.has_clip_tokens:
            file = self.folder / "tokenizer" / "tokenizer_config.json"
            max_tokens += json.loads(file.read_text(encoding="utf-8"))["model_max_length"]
        return self.family.encoded_shapes(model, max_tokens, latents, denoising.num_images)

    def _joined(self, networks: Mapping[str, ModelMixin]) -> nn.Module:
        if self._boundary is None:
            return networks[TRANSFORMER]
        return TwoTransformers(networks, float(self.family.times(torch.tensor(self._boundary))))

    def _unread(self, name: str) -> ModelMixin:
        return getattr(diffusers, self._index[name][1]).from_config(self._config(name))

    def _part(self, name: str, dtype: torch.dtype) -> ModelMixin:
        return AutoModel.from_pretrained(str(self.folder), subfolder=name, dtype=dtype, trust_remote_code=False)

    def vae(self, dtype: torch.dtype) -> ModelMixin:
        """The VAE that decodes latents, on the CPU."""
        return self._part(VAE, dtype)

    def encoder(self) -> Any:
        """A pipeline without the parts that denoise and decode, in float32."""
        needed = {name for name in self._parts() if name not in DENOISING} | set(self.family.encoder_parts)
        without: dict[str, Any] = {name: None for name in self._slots() if name not in needed}
        without |= {name: nn.Identity() for name in self.family.placeholders}
        if self.family.reads_shape:
            with torch.device("meta"):
                without[TRANSFORMER] = self._unread(TRANSFORMER)
        return DiffusionPipeline.from_pretrained(str(self.folder), dtype=torch.float32, **without)

    def schedule(self, denoising: Denoising) -> Schedule:
        """Noise levels and times of the checkpoint's scheduler."""
        name = self._index[SCHEDULER][1]
        scheduler = getattr(diffusers, name).from_pretrained(self.folder, subfolder=SCHEDULER)
        schedule = self.family.schedule(scheduler, denoising.num_steps, self.latent_shape(denoising))
        levels = schedule.sigmas
        if len(levels) != denoising.num_steps + 1 or not (
            0 <= levels[-1] and levels[0] <= 1 and levels.diff().lt(0).all()
        ):
            raise ValueError(
                f"policy.model={self.folder}: the {name} of its scheduler folder gives the noise levels "
                f"{[round(float(level), 4) for level in levels]}, which do not fall from 1 to 0 in "
                f"sampler.flow.num_steps={denoising.num_steps} steps: set use_flow_sigmas in its configuration"
            )
        return schedule

    def latent_shape(self, denoising: Denoising) -> tuple[int, ...]:
        if denoising.num_frames > 1 and not self.family.is_video:
            raise ValueError(
                f"sampler.flow.num_frames={denoising.num_frames}, and policy.model={self.folder} is a "
                f"{self._index['_class_name']}, which makes images: set sampler.flow.num_frames=1"
            )
        self._check_images(denoising)
        return self.family.latent_shape(self._config(TRANSFORMER), self._config(VAE), denoising.size)

    def _check_images(self, denoising: Denoising) -> None:
        num, known, kind = denoising.num_images, self.family.num_images, self._index["_class_name"]
        if num not in known:
            raise ValueError(
                f"sampler.flow.num_images={num}, and policy.model={self.folder} is a {kind}, which takes "
                f"{known[0]} to {known[-1]} condition images: set sampler.flow.num_images to one of these"
            )
        starts_from_image = self.family.starts_from_image and num > 0
        if denoising.strength < 1 and not starts_from_image:
            raise ValueError(
                f"sampler.flow.strength={denoising.strength:g}, and denoising of policy.model={self.folder}, a {kind}, "
                f"with sampler.flow.num_images={num} starts from no image: set sampler.flow.strength=1"
            )
        if starts_from_image and 0 in (denoising.first_step, denoising.without_noise.first_step):
            least = min(denoising.num_steps, denoising.without_noise.num_steps)
            raise ValueError(
                f"sampler.flow.strength={denoising.strength:g} starts {least} steps from noise, without the condition "
                f"image: set sampler.flow.strength to {1 - 1 / least:.3g} or less, or sampler.flow.num_images=0"
            )

    def takes_negatives(self, guidance: float) -> bool:
        return guidance != 1 and not self.family.embeds_guidance(self._config(TRANSFORMER))

    def canary(self, prompt: Prompt, denoising: Denoising) -> LatentSequence:
        """Returns arbitrary, deterministic steps after a prompt, which verify a weight push."""
        schedule = self.schedule(denoising)
        sigmas, timesteps = schedule.sigmas.numpy(), schedule.timesteps.numpy()
        return LatentSequence(canary_actions(denoising, self.latent_shape(denoising), sigmas, timesteps), prompt.media)

    def encoder_fingerprint(self) -> str:
        """Returns a fingerprint of the files that encode prompts."""
        folders = [self.folder / name for name in self._parts() if name not in DENOISING]
        files = sorted(file for folder in folders for file in folder.rglob("*") if file.is_file())
        names = [f"{file.relative_to(self.folder)} {file.stat().st_size}" for file in files]
        return hashlib.sha256("\n".join(names).encode()).hexdigest()

    def save(
        self, folder: Path, described: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]], dtype: str = ""
    ) -> None:
        """Writes this pipeline with new weights of the transformer, in the dtypes of its files or in `dtype`. One
        tensor is held at a time.

        Args:
            described: state-dict name -> tensor with the shape of the whole tensor; values are not read.
            tensors: (state-dict name, whole tensor) of each.
        """
        shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns(*self.networks), dirs_exist_ok=True)
        for name in self.networks:
            with torch.device("meta"):
                self._unread(name).save_config(folder / name)
        dtypes = SavedDtypes.of_files(self.weights_folder, dtype)
        files = {name: dtypes.described(name, tensor) for name, tensor in described.items()}
        cast = ((name, dtypes.cast(name, tensor)) for name, tensor in tensors)
        target = folder / self.weights_folder.relative_to(self.folder)
        write_weights(target, WEIGHTS_STEM, files, cast, MAX_FILE_SIZE, self.networks if self._boundary else ("",))

    def _slots(self) -> list[str]:
        return [name for name, value in self._index.items() if isinstance(value, list)]

    def _parts(self) -> list[str]:
        """Returns the parts of this pipeline; a Stable Diffusion 3 may lack its T5."""
        return [name for name in self._slots() if any(self._index[name])]

    def _config(self, part: str) -> dict[str, Any]:
        return json.loads((self.folder / part / "config.json").read_text(encoding="utf-8"))


def described_folder(source: str) -> Path:
    """The folder of the checkpoint with this folder or hub name; weights are not downloaded."""
    return Path(source) if Path(source).is_dir() else _downloaded(source, ["*.json", "*.txt", "*.model"])


def _downloaded(source: str, patterns: list[str] | None = None) -> Path:
    try:
        return Path(snapshot_download(source, allow_patterns=patterns))
    except GatedRepoError as error:
        raise ValueError(
            f"policy.model={source} is gated: accept its license on the hub and set HF_TOKEN to your token, or name a "
            "local folder"
        ) from error
    except (RepositoryNotFoundError, HFValidationError, LocalEntryNotFoundError) as error:
        raise ValueError(
            f"policy.model={source} is neither a folder here nor a name that the hub gives ({error}): check the name, "
            "and the connection"
        ) from error
