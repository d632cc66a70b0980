"""`mobula rollout` on real Ray: environments as Ray actors, of which those that hang are killed and named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from episode_data import Scripted

from mobula.actors.environments.base import Action, Reset, Step
from mobula.deploy.serve.rollout import IMAGES, JSON_FILE, PAGE_FILE
from mobula.learner.policies.tiny import TINY

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(600)]


class Patchy(Scripted):
    """Hangs in the second turn of every other episode."""

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        self._hangs, self._num_taken = seed % 2 == 1, 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Action) -> Step:
        self._num_taken += 1
        if self._hangs and self._num_taken == 2:
            time.sleep(600)
        return super().step(action)


def test_episodes_are_written_down_and_a_hung_environment_costs_its_episode(tmp_path: Path) -> None:
    model = TINY["qwen2.5-vl"](tmp_path / "model")
    words = [
        "policy=tiny_qwen2_5_vl", "resources=laptop", "sampler=huggingface", "data=environment", "rewards=environment",
        f"policy.model={model}", f"folder={tmp_path}", f"environment.name={__name__}:Patchy", "environment.host=ray",
        "environment.start_timeout_s=300", "environment.reset_timeout_s=120", "environment.step_timeout_s=5",
        "environment.retries=0", "environment.num_train=1", "environment.num_validation=1", "environment.num_test=4",
        "data.max_prompt_tokens=400", "data.max_pixels=50176", "sampler.max_images_per_prompt=8",
        "sampler.max_tokens=6",
    ]  # fmt: skip
    options = ["--episodes", "4", "--batch-size", "4", "--temperature", "0.7", "--top-p", "0.9", "--top-k", "64"]
    options += ["--seed", "3", "--output", str(tmp_path / "seen")]
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), *sys.path]))
    done = subprocess.run(
        [sys.executable, "-m", "mobula.deploy.cli", "rollout", *options, *words],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "seen" / JSON_FILE).read_text())
    good, hung = ([e for e in found["episodes"] if bool(e["failure"]) is failed] for failed in (False, True))
    assert [episode["reward"] for episode in good] == [6.0, 6.0]  # turns 1, 2 and 3
    assert [(e["reward"], e["failure"].partition(":")[0], len(e["turns"])) for e in hung] == [
        (None, "timed_out", 1)
    ] * 2
    assert all(len(e["turns"]) == 3 and len(e["turns"][0]["images"]) == 1 for e in good)
    named = {name for e in found["episodes"] for t in e["turns"] for name in t["images"]}
    assert named <= {path.name for path in (tmp_path / "seen" / IMAGES).iterdir()}
    assert "top-p 0.9, top-k 64" in found["summary"]["sampler"]
    assert found["summary"]["without a reward"] == 2 and found["summary"]["mean reward"] == 6.0
    page = (tmp_path / "seen" / PAGE_FILE).read_text()
    assert page.count("<article>") == 4 and page.count("timed_out") == 2 and "data:image/png" in page
