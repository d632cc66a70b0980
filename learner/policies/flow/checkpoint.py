"""FlowCheckpoint: the parts of a flow model in the layout of diffusers, each loaded by who needs it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoModel, DiffusionPipeline, ModelMixin, SchedulerMixin
from huggingface_hub import snapshot_download
from torch import Tensor

from cluster.records.trajectory import Prompt
from learner.policies.flow.denoising import Denoising, canary_actions
from learner.policies.flow.families import INDEX, TRANSFORMER, flow_family_at
from learner.policies.flow.rows import LatentSequence

DECODING = (TRANSFORMER, "vae", "scheduler")  # what sampling needs of a pipeline: prompts come encoded


class FlowCheckpoint:
    """A checkpoint folder or hub name whose family is supported.

    Raises:
        ValueError: it is no diffusers checkpoint, or of a family that is not supported.
    """

    def __init__(self, source: str) -> None:
        self.folder = Path(source) if Path(source).is_dir() else Path(snapshot_download(source))
        self.family = flow_family_at(self.folder)

    def transformer(self, dtype: torch.dtype) -> ModelMixin:
        """The network that is trained, on the CPU."""
        return AutoModel.from_pretrained(str(self.folder), subfolder=TRANSFORMER, dtype=dtype)

    def decoder(self, dtype: torch.dtype) -> Any:
        """A pipeline without the parts that encode prompts."""
        return self._pipeline(DECODING, dtype)

    def encoder(self) -> Any:
        """A pipeline without the parts that denoise and decode, in float32."""
        return self._pipeline([name for name in self._parts() if name not in DECODING], torch.float32)

    def codec(self) -> Any:
        """A pipeline of the VAE alone, in float32."""
        return self._pipeline(["vae"], torch.float32)

    def schedule(self, num_steps: int) -> tuple[Tensor, Tensor]:
        """(noise levels [S + 1], times [S]) of the checkpoint's scheduler, float32."""
        scheduler: Any = self._pipeline(["scheduler"], torch.float32).scheduler
        assert isinstance(scheduler, SchedulerMixin)
        scheduler.set_timesteps(num_steps)
        return scheduler.sigmas, scheduler.timesteps

    def latent_shape(self, denoising: Denoising) -> tuple[int, ...]:
        """Of the latents of one picture.

        Raises:
            ValueError: there are no pictures of this size.
        """
        parts = (self._config(TRANSFORMER), self._config("vae"))
        return self.family.latent_shape(*parts, denoising.height, denoising.width)

    def canary(self, prompt: Prompt, denoising: Denoising) -> LatentSequence:
        """Arbitrary steps after a prompt, the same wherever they are made: what a push of weights is proven by."""
        sigmas, timesteps = (values.numpy() for values in self.schedule(denoising.num_steps))
        return LatentSequence(canary_actions(denoising, self.latent_shape(denoising), sigmas, timesteps), prompt.media)

    def encoder_fingerprint(self) -> str:
        """Changes with the files that encode prompts."""
        folders = [self.folder / name for name in self._parts() if name not in DECODING]
        files = sorted(file for folder in folders for file in folder.rglob("*") if file.is_file())
        names = [f"{file.relative_to(self.folder)} {file.stat().st_size}" for file in files]
        return hashlib.sha256("\n".join(names).encode()).hexdigest()

    def save(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write a pipeline like this one with other weights of the transformer: state-dict name -> whole tensor."""
        ignored = shutil.ignore_patterns(TRANSFORMER)
        shutil.copytree(self.folder, folder, ignore=ignored, dirs_exist_ok=True)
        whole = self.transformer(torch.float32)
        whole.load_state_dict(dict(state))
        whole.save_pretrained(folder / TRANSFORMER)

    def _pipeline(self, parts: Collection[str], dtype: torch.dtype) -> Any:
        others: dict[str, Any] = {name: None for name in self._parts() if name not in parts}
        return DiffusionPipeline.from_pretrained(str(self.folder), dtype=dtype, **others)

    def _parts(self) -> list[str]:
        index = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
        return [name for name, value in index.items() if isinstance(value, list)]

    def _config(self, part: str) -> dict[str, Any]:
        return json.loads((self.folder / part / "config.json").read_text(encoding="utf-8"))
