"""Jobs over two hosts whose name resolves to 127.0.1.1: weights reach the other host, or it is refused."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from diffusers import DiffusionPipeline
from flow_run import REDNESS, WORDS, write_texts
from jobs import REPOSITORY, REWARD, SMALL
from ray_apart import COUNT, ENVIRONMENT, Host, reason_against, start_command, start_words, two_hosts, two_nodes

from mobula.cluster.metrics.report.run_folder import RunFolder, read_run_folder
from mobula.cluster.runtime.network import INTERFACE_VARIABLES
from mobula.configs.overrides import overridden

WHY_NOT = reason_against()
PORT = 6399
without_hosts = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1800), without_hosts]


@dataclass(frozen=True)
class Pair:
    """A head and another node, one a host."""

    head: Host
    other: Host
    folder: Path

    @property
    def address(self) -> str:
        return f"{self.head.address}:{PORT}"


def ray_node(host: Host, *words: str, **env: str) -> subprocess.Popen[bytes]:
    own = (f"--node-ip-address={host.address}", "--num-cpus=2", f"--labels=host={host.address}")
    return start_command(host.command(*start_words(*own, *words, store_bytes=200_000_000)), **env)


@pytest.fixture
def pair(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """`request.param` has environment variables of the other node."""
    for name in INTERFACE_VARIABLES:  # `local_ray` sets one of them until the session ends
        monkeypatch.delenv(name, raising=False)
    with two_hosts() as (head, other):
        found = Pair(head, other, tmp_path)
        nodes = (partial(ray_node, head), partial(ray_node, other, **request.param))
        with two_nodes(*nodes, found.address, lambda _: num_nodes(found)):
            yield found


def on_head(pair: Pair, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(pair.folder)}
    command = pair.head.command(sys.executable, *words)
    return subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=900)


def num_nodes(pair: Pair) -> int:
    done = on_head(pair, "-c", COUNT, pair.address)
    return int(done.stdout.rpartition("nodes ")[2]) if "nodes " in done.stdout else 0


def train(
    pair: Pair, *own: str, small: Sequence[str] = SMALL, reward: str = REWARD
) -> subprocess.CompletedProcess[str]:
    """Learner and reference on the head, engines on the other host."""
    (pair.folder / "job_reward.py").write_text(reward)
    words = [
        "name=job", "num_steps=2", f"folder={pair.folder / 'runs'}", f"policy.model={pair.folder / 'model'}",
        f"resources.address={pair.address}", f"rewards.components.0.function={pair.folder / 'job_reward.py'}:score",
        f"resources.rollout.node_labels={{host: {pair.other.address}}}",
        f"resources.learner.node_labels={{host: {pair.head.address}}}",
        *(own or ("experiment=digits", f"data.path={pair.folder / 'digits'}")),
    ]  # fmt: skip
    return on_head(pair, "-m", "mobula.deploy.cli", "train", *overridden(small, words))


@pytest.mark.parametrize("pair", [{}], indirect=True, ids=["as-it-is"])
def test_weights_reach_engines_on_the_other_host(pair: Pair) -> None:
    looked_up = on_head(pair, "-c", "import socket; print(socket.gethostbyname(socket.gethostname()))")
    assert looked_up.stdout.strip() == "127.0.1.1", "the trap is set"
    placed(pair, train(pair))


@pytest.mark.parametrize("pair", [{}], indirect=True, ids=["as-it-is"])
def test_a_flow_model_is_sampled_on_one_host_and_trained_on_the_other(pair: Pair) -> None:
    texts = write_texts(pair.folder / "texts")
    words = [word for word in WORDS if not word.startswith("resources.")]
    words += ["resources=laptop", "resources.learner.num_workers=1", "resources.reference.num_workers=0"]
    words += ["evaluation.num_prompts=4", "metrics.progress=false", "resources.object_store_bytes=100000000"]
    run = placed(pair, train(pair, f"data.path={texts}", small=words, reward=REDNESS))
    assert run.summary.logprob_gap_mean == 0
    pipeline = DiffusionPipeline.from_pretrained(pair.folder / "runs" / "job" / "policy")
    assert type(pipeline).__name__ == "StableDiffusion3Pipeline"


def placed(pair: Pair, done: subprocess.CompletedProcess[str]) -> RunFolder:
    """The run of two steps that is done, its engines on the other host."""
    assert done.returncode == 0, done.stdout + done.stderr
    run = read_run_folder(pair.folder / "runs" / "job")
    assert (run.summary.status, run.summary.weight_syncs, run.summary.restarts) == ("done", 3, 0)
    places = {(row.role, row.node.partition("(")[2].rstrip(")")) for row in run.plan}
    assert ("rollout", pair.other.address) in places and ("learner", pair.head.address) in places
    return run


@pytest.mark.parametrize("pair", [{"GLOO_SOCKET_IFNAME": "lo"}], indirect=True, ids=["on-the-loopback"])
def test_hosts_that_would_not_meet_are_refused_before_anything_loads(pair: Pair) -> None:
    done = train(pair)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"({pair.head.address}) at {pair.head.address} on mb" in done.stderr
    assert f"does not reach {socket.gethostname()} ({pair.other.address}) at 127.0.0.1 on lo" in done.stderr
    assert "GLOO_SOCKET_IFNAME" in done.stderr
    assert not (pair.folder / "runs" / "job").exists()
