"""The parity gate of real runs: models that trained behind it, with a note, and one that was refused with its gap."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Job

from mobula.learner.policies.families import UNKNOWN, family_at

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(900)]

WORDS = (
    "experiment=digits", "resources=laptop_overlapped", "learner=single", "num_steps=1",
    "sampler.max_images_per_prompt=2",
)  # fmt: skip
BFLOAT16 = ("resources.dtype=bfloat16",)
SCRIPT = (str(Path(__file__).with_name("replaced_job.py")), "Learner=disturbed:DisturbedLearner")


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    name, *words = request.param
    data = f"data.path={tmp_path / 'digits'}"
    with Job(tmp_path, (*WORDS, data, f"policy.tiny={name}", *words)) as job:
        yield job


def gaps(text: str) -> dict[str, float]:
    """What the gate measured, by what the prompt shows."""
    return {name: float(gap) for name, gap in re.findall(r"(text|one image|two images|video): ([0-9.e-]+)", text)}


@pytest.mark.parametrize(
    ("job", "most"),
    [(("llava",), 1e-4), (("qwen3.5", *BFLOAT16), 0.2)],
    indirect=["job"],
    ids=["of no family here", "in bfloat16"],
)
def test_a_model_that_agrees_trains_a_step_with_a_note(job: Job, most: float) -> None:
    job.trained(1)
    log = (job.run_folder / "run.log").read_text(encoding="utf-8")
    assert "are compared before the first step" in log
    [line] = [line for line in log.splitlines() if "trains because engine and learner agree" in line]
    found = gaps(line)
    assert {"text", "one image", "two images"} <= set(found)
    assert max(found.values()) <= most


@pytest.mark.parametrize("job", [("llava",)], indirect=True)
def test_a_model_whose_tower_is_disturbed_is_refused_with_the_measured_gap(job: Job) -> None:
    job.write_reward()
    words = [f"folder={job.folder / 'runs'}", "name=job", f"policy.model={job.folder / 'model'}"]
    process = job.start_script(*SCRIPT, *words, *job.overrides, *job.small)
    assert process.wait(600) != 0
    assert family_at(str(job.folder / "model")) is UNKNOWN
    output = " ".join(job.output.split())
    refusal = output[output.index("engine and learner compute other log-probs") :]
    found = gaps(refusal)
    assert found["text"] <= 1e-4 < 1e-3 < found["one image"]
    assert "cannot be trained; choose a supported type" in refusal
    assert job.steps == []
