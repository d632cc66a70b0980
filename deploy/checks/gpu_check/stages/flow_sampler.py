"""A learner of a flow model and the flow sampler: sample images, train on their steps, push."""

from __future__ import annotations

import asyncio

from mobula.actors.datasets.rows import Row
from mobula.actors.processors.flow import FlowProcessor
from mobula.cluster.records.media import MediaStore
from mobula.cluster.weight_sync.manifest import checkpoint_manifest
from mobula.configs.load import load_config
from mobula.deploy.checks.gpu_check.context import Context, Figures
from mobula.deploy.checks.gpu_check.roles import Model, train
from mobula.learner.policies.flow.families import TRANSFORMER
from mobula.learner.policies.flow.tiny import write_tiny_flow

WORDS = (
    "experiment=glyphs_grpo",
    "policy.tiny=none",
    "data.path=unused",
    "learner.learning_rate=0.003",
    "weight_sync.bucket_bytes=1048576",
    "weight_sync.timeout_s=60",
)


def run(context: Context) -> Figures:
    folder = write_tiny_flow("sd3_glyphs", context.folder / "sd3", seed=0)
    config = load_config(context.words(*WORDS, f"policy.model={folder}"))
    processor = FlowProcessor.of(config, MediaStore(lambda media: media, config.data.media_cache_bytes))
    rows = [Row(f"number-{n}", str(n), str(n), str(n)) for n in (7, 42)]
    prompts = tuple(processor.prepare(row, f"0/0/{row.sample_id}") for row in rows)
    manifest = checkpoint_manifest(folder / TRANSFORMER, config.resources.dtype)
    return asyncio.run(train(context, Model(config, folder / TRANSFORMER, manifest, processor, prompts)))
