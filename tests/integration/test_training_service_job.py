"""`mobula serve-training` with real learner ranks and engines, the official client and recipes of tinker-cookbook."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import tinker
from tiny_text_models import write_text_policy

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]

types = tinker.types
COOKBOOK = Path(__file__).parents[2] / ".venv-tinker-cookbook" / "bin" / "python"
RECIPES = Path(__file__).parents[1] / "support" / "cookbook_recipes.py"
WORDS = ["sampler=huggingface", "learner=single", "resources.learner.num_workers=1", "resources.rollout.num_workers=1"]
WORDS += [
    "resources.dtype=float32",
    "sampler.max_model_len=256",
    "data.max_prompt_tokens=128",
    "sampler.max_tokens=64",
    "training_service.snapshot_steps=3",
]
ADAM = types.AdamParams(learning_rate=5e-3)
KEY = "tml-a-key-of-the-tests"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_policy(tmp_path_factory.mktemp("models") / "tiny", "llama")


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number: int = listener.getsockname()[1]
        return number


def start(model: Path, folder: Path, port: int) -> subprocess.Popen[bytes]:
    """Starts the command and waits until it answers."""
    command = [sys.executable, "-m", "mobula.deploy.cli", "serve-training", f"policy.model={model}", *WORDS]
    process = subprocess.Popen([*command, "--port", str(port), "--folder", str(folder)], cwd=folder.parent)
    deadline = time.monotonic() + 300
    while not is_up(port):
        assert process.poll() is None, "the service ended"
        assert time.monotonic() < deadline, "the service does not start"
        time.sleep(0.5)
    return process


def is_up(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").is_success
    except httpx.TransportError:
        return False


def end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Ends the command; after SIGKILL its cluster as well."""
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    process.wait(120)
    for child in children:
        if child.is_running():
            child.kill()
    psutil.wait_procs(children, timeout=30)


@contextmanager
def serving(model: Path, folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    process = start(model, folder, port)
    try:
        yield process
    finally:
        end(process, signal.SIGTERM)


def connect(port: int) -> Any:
    return tinker.ServiceClient(base_url=f"http://127.0.0.1:{port}", api_key=KEY)


def rows_of(tokenizer: Any) -> list[Any]:
    rows = []
    for a, b in ((1, 2), (3, 4)):
        tokens = tokenizer.encode(f"{a} + {b} = {a + b}")
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        rows.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return rows


def train(client: Any, rows: list[Any], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        computed, stepped = client.forward_backward(rows, "cross_entropy"), client.optim_step(ADAM)
        losses.append(computed.result().metrics["loss:sum"])
        stepped.result()
    return losses


def test_client_trains_samples_and_survives_kills(model: Path, tmp_path: Path, port: int) -> None:
    process = start(model, tmp_path / "service", port)
    try:
        with connect(port) as service:
            first, second = (service.create_lora_training_client(str(model), rank=8, seed=1).result() for _ in range(2))
            rows = rows_of(first.get_tokenizer())
            expected = train(first, rows, 10)
            assert expected[-1] < 0.5 * expected[0]
            sampler = first.save_weights_and_get_sampling_client().result()
            tokens = rows[0].model_input.to_ints()
            scored = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
            forward = first.forward(rows, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
            np.testing.assert_allclose(scored[1:], forward[:-1], atol=1e-4)
            params = types.SamplingParams(max_tokens=4, temperature=0.0)
            sampled = sampler.sample(types.ModelInput.from_ints(tokens[:-1]), 2, params).result()
            assert sampled.sequences[0].tokens[0] == tokens[-1]

            losses = train(second, rows, 4)
            kill_actor(process, "AdapterRank")
            losses += train(second, rows, 2)
            pending = [(second.forward_backward(rows, "cross_entropy"), second.optim_step(ADAM)) for _ in range(4)]
            pending[0][0].result()
            end(process, signal.SIGKILL)
            process = start(model, tmp_path / "service", port)
            losses += [computed.result().metrics["loss:sum"] for computed, _ in pending]
            assert [stepped.result().metrics["optimizer_steps"] for _, stepped in pending] == [7, 8, 9, 10]
            np.testing.assert_allclose(losses, expected, atol=1e-4, rtol=1e-4)

            kill_actor(process, "RolloutActor")
            again = sampler.sample(types.ModelInput.from_ints(tokens[:-1]), 2, params).result()
            assert again.sequences[0].tokens == sampled.sequences[0].tokens
    finally:
        end(process, signal.SIGTERM)


def kill_actor(process: subprocess.Popen[bytes], name: str) -> None:
    """Kills the worker process of an actor class below the command."""
    for child in psutil.Process(process.pid).children(recursive=True):
        if name in " ".join(child.cmdline()):
            child.kill()
            return
    raise AssertionError(f"no process of {name} runs")


@pytest.mark.skipif(not COOKBOOK.exists(), reason="no environment of tinker-cookbook: make tinker-cookbook")
def test_recipes_run_unchanged_and_learn(model: Path, tmp_path: Path, port: int) -> None:
    with serving(model, tmp_path / "service", port):
        metrics = {}
        for recipe in ("sl_basic", "rl_basic"):
            (tmp_path / recipe).mkdir()
            command = [
                str(COOKBOOK),
                str(RECIPES),
                recipe,
                f"http://127.0.0.1:{port}",
                str(model),
                str(tmp_path / recipe),
            ]
            environment = {**os.environ, "TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
            subprocess.run(command, check=True, timeout=400, env=environment)
            lines = (tmp_path / recipe / "log" / "metrics.jsonl").read_text().splitlines()
            metrics[recipe] = [json.loads(line) for line in lines]
    losses = [line["train_mean_nll"] for line in metrics["sl_basic"] if "train_mean_nll" in line]
    assert losses[-1] < 0.7 * losses[0]
    assert len(metrics["rl_basic"]) >= 3
