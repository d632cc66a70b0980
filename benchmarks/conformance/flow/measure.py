"""Measures flow models: `python -m benchmarks.conformance.flow.measure FOLDER NAME ...` writes their reports.

A sampler and a learner in this process train a tiny checkpoint for one step, its weights and then adapters; plain
diffusers makes the same images of what they export.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoModel
from PIL import Image
from torch import nn

from benchmarks.conformance.flow.plain import PlainPrompt, plain_frames
from mobula.actors.rollout.actor import RolloutActor
from mobula.cluster.records.actions import LatentActions
from mobula.cluster.records.partial_response import Attempt
from mobula.cluster.records.trajectory import Prompt, Reward, ScoredGroup, TrajectoryGroup
from mobula.cluster.roles import SamplingSettings
from mobula.configs.load import load_config
from mobula.configs.overrides import overridden
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.preparation import Prepared, prepare
from mobula.deploy.wiring.roles import engine_settings
from mobula.learner.learner import Learner
from mobula.learner.policies.adapters import adapted_modules
from mobula.learner.policies.flow.checkpoint import FlowCheckpoint
from mobula.learner.policies.flow.families import pipeline_index
from mobula.learner.policies.flow.policy import Denoising
from mobula.learner.policies.flow.tiny import write_tiny_flow
from mobula.learner.policy_weights import export_state

REPORT = "report.json"
TEXTS = ("a red cube", "71")
BUCKET_BYTES = 1 << 24
DEVIATION = 0.08  # of the tiny model's matrices: a text and a noise level then matter
DEVIATIONS = {"flux2": 0.2}  # it has no biases: with smaller matrices, the gates of its blocks are nearly 0
SIDE = 32  # pixels
EDITING: dict[str, tuple[str, ...]] = {  # models measured with as many condition images as they take -> settings
    "sd3-img2img": ("sampler.flow.strength=0.5", "sampler.flow.window_start=2"),
    "flux-kontext": (),
    "flux2": (),
    "qwen-image-edit": ("sampler.flow.max_text_tokens=512",),
    "wan-i2v": ("sampler.flow.max_text_tokens=512",),
}
MOST_IMAGES = 2  # of a prompt
WORDS = (
    "sampler=flow",
    "learner=single",
    "resources.learner.num_workers=1",
    "resources.reference.num_workers=0",
    "algorithm.kl.coef=0",
    f"algorithm.prompts_per_step={len(TEXTS)}",
    "algorithm.samples_per_prompt=4",
    f"sampler.flow.height={SIDE}",
    f"sampler.flow.width={SIDE}",
    "sampler.flow.num_steps=4",
    "sampler.flow.window_end=3",
    "sampler.flow.max_text_tokens=128",
    "learner.tokens_per_microbatch=8192",
    "learner.learning_rate=0.001",
    "learner.warmup_steps=0",
)
ADAPTERS = ("policy.lora.rank=4", "policy.lora.alpha=8", "weight_sync.payload=adapters", "learner.learning_rate=0.05")


@dataclass(frozen=True)
class Trained:
    """Measurements of one training step."""

    replay_gap: float  # largest |log-prob of the sampler - of the learner| in the first step
    push_gap: float  # the same on the canary after the push of the trained weights
    moved: float  # largest change of the canary's log-probs by that push
    is_resumed: bool  # a learner that loads the saved state scores the canary alike
    image_gap: int  # levels of 0 to 255, between the sampler's image and that of plain diffusers from the export


@dataclass(frozen=True)
class FlowReport:
    """Measurements of one family."""

    name: str
    pipeline: str
    num_parameters: int  # of the transformer
    frames: tuple[int, ...]  # [F, H, W, 3]
    num_adapted: int  # layers with an adapter
    weights: Trained
    adapters: Trained


class Measurement:
    """A sampler and a learner of one checkpoint."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        prepared = prepare(config, lambda value: value)
        assert isinstance(prepared, Prepared)
        self.prepared = prepared
        self._actor = RolloutActor("flow", engine_settings(self.prepared, 0), object_timeout_s=5)
        self._learner = self._connected()
        rows = self.prepared.usable("train").rows
        self._prompts = [self.prepared.processor.prepare(row, f"0/{n}/{row.sample_id}") for n, row in enumerate(rows)]
        self.num_frames_seen: tuple[int, ...] = ()

    async def run(self) -> Trained:
        await self._actor.start()
        await self._push()
        before = await self._actor.prompt_logprobs(self._prompts[0])
        report = self._learner.update([self._scored(await self._group(prompt)) for prompt in self._prompts], 1)
        await self._push()
        after, expected = await self._actor.prompt_logprobs(self._prompts[0]), self._canary(self._learner)
        state = self._folder / "state"
        self._learner.save(state)
        self._learner.finish_save()
        again = self._connected()
        again.load(state)
        return Trained(
            replay_gap=report.metrics["logprob_gap_max"],
            push_gap=float(np.abs(after - expected).max()),
            moved=float(np.abs(after - before).max()),
            is_resumed=bool(np.array_equal(self._canary(again), expected)),
            image_gap=await self._image_gap(state),
        )

    def _connected(self) -> Learner:
        learner = Learner(self._config, 0, 1, ())
        learner.connect("")
        return learner

    def _canary(self, learner: Learner) -> np.ndarray:
        return learner.sequence_logprobs(self._prompts[0])

    async def _push(self) -> None:
        version, buckets = self._learner.export_weights(BUCKET_BYTES)
        await self._actor.check_manifest(self._learner.manifest())
        await self._actor.load_weights(self._learner.manifest(), BUCKET_BYTES, buckets, version)

    async def _group(self, prompt: Prompt, num: int = 4, temperature: float = 1.0) -> TrajectoryGroup:
        settings = SamplingSettings(num, temperature, 1, 5).for_prompt(prompt.prompt_id)
        attempt = Attempt(f"{temperature}/{prompt.prompt_id}")
        return (await self._actor.generate(prompt, settings, attempt))[0]

    def _scored(self, group: TrajectoryGroup) -> ScoredGroup:
        values = (float(_frames(t.response.images)[..., 0].mean()) for t in group.trajectories)
        return ScoredGroup(group.summary(), group, tuple(map(Reward, values)))

    async def _image_gap(self, state: Path) -> int:
        """Pixel difference between the exported model in plain diffusers and the sampler without noise."""
        config, out, flow = self._config, self._folder / "export", self._config.sampler.flow
        export_state(config, state, out, merge=False, average=False)
        is_adapter = config.policy.lora.is_on
        [own] = (await self._group(self._prompts[0], 1, 0.0)).trajectories
        frames = _frames(own.response.images)
        self.num_frames_seen = frames.shape
        checkpoint, denoising = FlowCheckpoint(config.policy.model), Denoising.of(flow)
        assert isinstance(own.actions, LatentActions)
        first = torch.from_numpy(own.actions.latents[:1].copy()) / checkpoint.schedule(denoising).initial_std
        pipeline, adapters = (checkpoint.folder, out) if is_adapter else (out, None)
        prompt = PlainPrompt(self._prompts[0].text, _condition_images(config.data.path)[: flow.num_images])
        plain = plain_frames(pipeline, prompt, first, denoising, flow.max_text_tokens, adapters)
        return int(np.abs(plain.astype(int) - frames.astype(int)).max())


def measure(name: str, folder: Path) -> FlowReport:
    """Measures the family of a tiny model; `folder` must be new."""
    model = write_tiny_flow(name, folder / "model")
    _make_loud(model, DEVIATIONS.get(name, DEVIATION))
    checkpoint = FlowCheckpoint(str(model))
    num_images = min(MOST_IMAGES, checkpoint.family.num_images[-1]) if name in EDITING else 0
    _write_rows(folder / "texts", num_images)
    own = (
        f"policy=tiny_{name.replace('-', '_').replace('.', '_')}",
        f"policy.model={model}",
        f"data.path={folder / 'texts'}",
        f"folder={folder / 'runs'}",
        f"sampler.flow.num_frames={5 if checkpoint.family.is_video else 1}",
        f"sampler.flow.num_images={num_images}",
    )
    words = overridden(WORDS, EDITING.get(name, ()))
    weights = Measurement(load_config([*words, *own]), folder / "weights")
    trained_weights = asyncio.run(weights.run())
    config = load_config(overridden([*words, *own], ADAPTERS))
    adapters = Measurement(config, folder / "adapters")
    return FlowReport(
        name,
        pipeline_index(model)["_class_name"],
        sum(parameter.numel() for parameter in checkpoint.transformer(torch.float32).parameters()),
        weights.num_frames_seen,
        len(adapted_modules(adapters.prepared.checkpoint, config.policy)),
        trained_weights,
        asyncio.run(adapters.run()),
    )


def read_report(file: Path) -> FlowReport:
    """Reads the report that `main` wrote."""
    fields = json.loads(file.read_text(encoding="utf-8"))
    fields |= {key: Trained(**fields[key]) for key in ("weights", "adapters")}
    return FlowReport(**fields | {"frames": tuple(fields["frames"])})


def _frames(images: tuple[bytes, ...]) -> np.ndarray:
    return np.stack([np.asarray(Image.open(io.BytesIO(image))) for image in images])


def _make_loud(folder: Path, deviation: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for name in FlowCheckpoint(str(folder)).networks:
        model = AutoModel.from_pretrained(str(folder), subfolder=name, trust_remote_code=False)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=deviation, generator=generator)
        model.save_pretrained(folder / name)


def _write_rows(folder: Path, num_images: int) -> None:
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    names = [f"{n}.png" for n in range(num_images)]
    for name in names:
        Image.fromarray(generator.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(folder / name)
    own = {"images": names} if names else {}
    texts = ("<image>" * num_images + text for text in TEXTS)
    rows = "\n".join(json.dumps({"id": f"t{n}", "question": t, "answer": t, **own}) for n, t in enumerate(texts))
    for split in ("train", "validation", "test"):
        (folder / f"{split}.jsonl").write_text(rows, encoding="utf-8")


def _condition_images(folder: Path) -> list[Image.Image]:
    return [Image.open(file).convert("RGB") for file in sorted(folder.glob("*.png"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+")
    args = parser.parse_args()
    for name in args.names:
        folder = args.folder / name
        folder.mkdir(parents=True)
        (folder / REPORT).write_text(json.dumps(asdict(measure(name, folder)), indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
