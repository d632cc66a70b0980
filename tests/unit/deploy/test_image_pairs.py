"""Diffusion-DPO from end to end in one process, on pairs of images and of latents."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from flow_model import made_loud
from offline_run import OfflineRun
from PIL import Image, ImageOps

from mobula.actors.datasets.preferences import read_image_pairs
from mobula.actors.datasets.rows import count_by_reason
from mobula.cluster.errors import DatasetError
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config
from mobula.configs.overrides import overridden
from mobula.configs.schema import RunConfig
from mobula.examples.glyphs.glyphs import rendered
from mobula.learner.policies.flow.tiny import write_tiny_flow

WORDS = (
    "experiment=dpo", "policy=tiny_sd3_glyphs", "sampler=flow", "sampler.flow.height=16", "sampler.flow.width=16",
    "sampler.flow.guidance=1", "sampler.flow.max_text_tokens=1", "learner=single",
    "learner.activation_checkpointing=none", "learner.learning_rate=0.002", "learner.warmup_steps=0",
    "resources.learner.num_workers=1", "resources.reference.num_workers=0", "offline.batch_size=16",
    "offline.dpo.beta=20", "evaluation.num_prompts=16", "evaluation.interval_steps=0", "num_steps=15",
    "metrics.ray=false", "metrics.tensorboard=false", "metrics.progress=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and pairs whose better image is white on black and the other black on white."""
    found = tmp_path_factory.mktemp("pairs")
    made_loud(write_tiny_flow("sd3_glyphs", found / "model"))
    for split, numbers in (("train", range(0, 80)), ("validation", range(80, 100))):
        rows = []
        for number in numbers:
            better, worse = found / f"{number}.png", found / f"{number}.npy"
            image = rendered(f"{number:02d}", 11.5, (0, 0))
            image.save(better)
            inverted = np.asarray(ImageOps.invert(image), dtype=np.float32)[None] / 127.5 - 1
            np.save(worse, inverted)
            rows.append({"prompt": f"write {number:02d}", "chosen": better.name, "rejected": worse.name})
        (found / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return found


def config(folder: Path, runs: Path, *words: str) -> RunConfig:
    own = (f"policy.model={folder / 'model'}", f"data.path={folder}", f"folder={runs}", "name=run")
    return load_config(overridden([*WORDS, *own], words))


@pytest.mark.parametrize("words", [(), ("policy.lora.rank=8", "learner.learning_rate=0.01")], ids=["full", "lora"])
async def test_pairs_teach_which_image_is_preferred(folder: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    found = config(folder, tmp_path, *words)
    metrics = await OfflineRun(found).go()
    first, last = metrics.totals.evaluations
    assert first.values["loss"] == pytest.approx(np.log(2), abs=1e-5), "at first it is the initial policy"
    assert last.values["margin"] > 0 and last.accuracy > 0.9
    assert last.values["loss"] < first.values["loss"]
    assert (found.run_folder / "policy" / "model_index.json").is_file()


def test_rows_that_cannot_be_used_are_named(folder: Path, tmp_path: Path) -> None:
    good = {"prompt": "write 42", "chosen": "a.png", "rejected": "b.png"}
    for name in ("a.png", "b.png"):
        Image.new("L", (16, 16)).save(tmp_path / name)
    bad = [
        {**good, "prompt": " "},
        {**good, "chosen": "../a.png"},
        {**good, "rejected": "none.png"},
        {**good, "rejected": "a.png"},
        {**good, "chosen": 3},
        [],
    ]
    (tmp_path / "train.jsonl").write_text("\n".join([*map(json.dumps, (good, *bad)), "{"]), encoding="utf-8")
    found = read_image_pairs(tmp_path, "train")
    assert [row.question for row in found.rows] == ["write 42"]
    assert count_by_reason(found.skipped) == {
        "missing_prompt": 1,
        "outside_folder": 1,
        "missing_file": 1,
        "same_image": 1,
        "missing_image": 1,
        "broken_json": 2,
    }
    with pytest.raises(DatasetError, match="does not exist"):
        read_image_pairs(tmp_path, "test")


def test_sharded_weights_of_deepspeed_are_not_exchanged_with_the_initial_ones(folder: Path, tmp_path: Path) -> None:
    words = ("learner=deepspeed", "resources.learner.num_workers=2")
    config(folder, tmp_path, *words, "learner.zero_stage=2")
    with pytest.raises(
        ConfigError, match=r"offline\.job=dpo of a flow model .*set learner\.zero_stage=2, or use learner=fsdp2"
    ):
        config(folder, tmp_path, *words, "learner.zero_stage=3")
