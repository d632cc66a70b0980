"""A rehearsal: a run's wiring around simulated roles, from its words to its page."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from mobula.cluster.errors import PreflightError
from mobula.deploy.rehearsal.command import rehearse
from mobula.deploy.rehearsal.options import RehearseCommand

WORDS = (
    "experiment=own",
    "resources=multi_node",
    "policy.tiny=qwen2.5-vl",
    "policy.model=not-there",
    "algorithm.prompts_per_step=8",
    "algorithm.samples_per_prompt=4",
    "evaluation.num_prompts=4",
    "sampler.max_tokens=128",
)
STATED = ("decode_step_s=0.02", "learner_tokens_per_s=500", "start_s=10", "update_s=1", "reward_s=0")


def page(tmp_path: Path, *words: str, base: Sequence[str] = WORDS, nodes: str = "2x8x80GB", **options: object) -> dict:
    """The page as JSON."""
    file = tmp_path / "page.json"
    arguments = {"words": STATED, "prompt_tokens": 100, "num_steps": 6, "with_gains": False, **options}
    command = RehearseCommand(overrides=[*base, *words], nodes=nodes, json_file=file, **arguments)
    rehearse(command, Console(quiet=True))
    return json.loads(file.read_text())


def test_a_synchronous_step_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    stated = (*STATED, "exchange_s=0.4", "step_s=0.25", "push_s=0.2", "settle_s=0.3")
    found = page(tmp_path, "algorithm.max_staleness=0", mean_tokens=50, sigma=0.0, words=stated)
    assert found["result"]["staleness"] == {"0": 1.0}
    # 8 prompts on 8 engines: 50 steps; 32 rows of 150 tokens on 8 ranks.
    phases = found["result"]["phases"]
    assert phases["update"] == pytest.approx(1 + 0.4 + 32 * 150 / 8 / 500)
    assert phases["other"] == pytest.approx(0.25)
    speeds = found["speeds"]
    decoding_s = 50 * (speeds["decode_step_s"] + 4 * speeds["decode_sequence_s"]) + 100 / speeds["prefill_tokens_per_s"]
    assert phases["weight_sync"] == pytest.approx(0.2, rel=0.02)
    assert phases["wait_for_rollouts"] == pytest.approx(0.3 - 0.25 + decoding_s, rel=0.02)  # engines load meanwhile
    assert 0 < found["result"]["driver"]["measured_s"] < 5


def test_staleness_takes_the_waits_away_and_stays_within_its_bound(tmp_path: Path) -> None:
    waits = {}
    for bound in (0, 2):
        found = page(tmp_path, f"algorithm.max_staleness={bound}", mean_tokens=100, num_steps=10)
        waits[bound] = found["wait_share"]
        assert max(map(int, found["result"]["staleness"])) <= bound
    assert waits[2] < waits[0] / 2


def test_a_larger_size_and_the_gain_of_each_role_are_on_the_page(tmp_path: Path) -> None:
    found = page(tmp_path, mean_tokens=100, factors=(1, 2), with_gains=True)
    assert [(size["num_engines"], size["num_ranks"]) for size in found["sizes"]] == [(8, 8), (16, 16)]
    assert found["gains"][0]["gain"] > 0


def test_an_engine_that_is_lost_with_its_node_is_replaced_and_the_run_ends_as_planned(tmp_path: Path) -> None:
    words = ("resources.num_nodes=2", "timeouts.start_s=3000")
    found = page(tmp_path, *words, mean_tokens=100, faults=("preemption:node-1@2+20",))
    assert len(found["played"]["steps"]) == 6
    assert any("preemption of node-1" in event for event in found["played"]["events"])
    assert found["played"]["counters"]["restarts"]


@pytest.mark.parametrize(("node", "roles"), [("node-0", {"learner"}), ("node-1", {"rollout", "reference", "reward"})])
def test_all_workers_of_a_lost_node_go_on_elsewhere(tmp_path: Path, node: str, roles: set[str]) -> None:
    words = ("timeouts.start_s=3000", "algorithm.kl.coef=0.01")
    found = page(tmp_path, *words, nodes="4x8x80GB", mean_tokens=100, faults=(f"node_loss:{node}@2",))
    played = found["played"]
    assert (played["error"], len(played["steps"])) == ("", 6)
    [lost] = [event for event in played["events"] if "are lost" in event]
    assert {name.partition("/")[0] for name in lost.partition("are lost: ")[2].split(", ")} == roles
    assert sum(played["counters"]["restarts"].values()) >= len(roles)
    seconds = [step["seconds"]["total"] for step in played["steps"]]
    assert max(seconds) > found["speeds"]["start_s"], "the start of new workers takes its time"


def test_a_lost_node_without_a_spare_one_ends_the_run_by_name(tmp_path: Path) -> None:
    found = page(tmp_path, "timeouts.start_s=60", mean_tokens=100, faults=("node_loss:node-0@2",))
    assert "the learner has no place" in found["played"]["error"]
    assert 1 <= len(found["played"]["steps"]) < 6


def test_a_sweep_ends_at_a_size_that_takes_too_long_here(tmp_path: Path) -> None:
    found = page(tmp_path, mean_tokens=100, factors=(1, 2), size_s=0.001)
    assert found["sizes"] == []
    assert "x1 and larger sizes are unknown: ended after 0.001 s here" in found["sizes_ended"]


def test_the_object_store_of_the_drivers_node_overflows_at_a_size(tmp_path: Path) -> None:
    words = ("resources.object_store_bytes=100000000", "algorithm.max_staleness=1")
    media = {"media_tokens": 64, "media_bytes": 1_000_000}
    found = page(tmp_path, *words, mean_tokens=50, factors=(1, 16), **media)
    small, large = found["sizes"]
    assert small["broken"] == []
    assert any(limit.startswith("object store of node-0") for limit in large["broken"])


def test_a_full_disk_ends_the_run_with_its_error(tmp_path: Path) -> None:
    found = page(tmp_path, "checkpoints.interval_steps=2", faults=("full_disk@2",))
    assert "No space left on device" in found["played"]["error"]


@pytest.mark.slow
def test_256_engines_and_512_ranks_are_played_in_a_minute_of_cpu_time(tmp_path: Path) -> None:
    started = time.process_time()
    words = (
        "resources.rollout.num_workers=256",
        "resources.learner.num_workers=512",
        "resources.reference.num_workers=0",
        "algorithm.max_staleness=1",
    )
    many = ("algorithm.prompts_per_step=512", "algorithm.max_concurrent_groups=1024")
    overrides = tuple(word for word in WORDS if not word.startswith("algorithm.prompts_per_step"))
    found = page(tmp_path, *words, *many, mean_tokens=100, base=overrides, nodes="96x8x80GB")
    assert len(found["played"]["steps"]) == 6
    assert sum(found["result"]["staleness"].values()) == pytest.approx(1)
    assert time.process_time() - started < 60


def test_work_of_ray_in_the_driver_grows_with_the_size_alone(tmp_path: Path) -> None:
    found = page(tmp_path, mean_tokens=20, sigma=0.0, factors=(1, 32))
    shares = [size["result"]["driver"]["ray_s"] / size["num_ranks"] for size in found["sizes"]]
    assert shares[1] < 1.1 * shares[0]


def test_the_speeds_of_a_cpu_are_not_guessed(tmp_path: Path) -> None:
    command = RehearseCommand(overrides=[WORDS[0], "resources=laptop", *WORDS[2:]], prompt_tokens=100)
    with pytest.raises(PreflightError, match="--measured"):
        rehearse(command, Console(quiet=True))
