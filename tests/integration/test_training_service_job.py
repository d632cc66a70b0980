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
from fastapi.testclient import TestClient
from tiny_text_models import write_text_policy

from mobula.configs.load import load_config
from mobula.deploy.tools.policy.conversations import Conversations
from mobula.deploy.tools.policy.local_policy import LocalPolicy
from mobula.deploy.tools.policy.serve_policy import make_app
from mobula.deploy.training_service.captured import captured_rows
from mobula.learner.policies.tiny import TINY

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]

types = tinker.types
COOKBOOK = Path(__file__).parents[2] / ".venv-tinker-cookbook" / "bin" / "python"
EXAMPLE = Path(__file__).parents[2] / "examples" / "training_service.py"
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


def captured(model: Path, folder: Path) -> None:
    """Answers two sessions of one task with `serve-policy`; their rewards are 0 and 1."""
    words = ["policy=tiny_qwen2_5", f"policy.model={model}", "data=digits", "resources=laptop", *WORDS[:1]]
    policy = LocalPolicy(load_config(words, is_complete=False))
    body = {"messages": [{"role": "user", "content": "2 + 3?"}], "max_tokens": 6, "temperature": 1.0}
    with TestClient(make_app(policy, Conversations(policy, folder, num_siblings=2))) as client:
        for number in range(2):
            session = f"session-{number}"
            client.post("/v1/sessions", json={"session": session, "task": "sum"}).raise_for_status()
            headers = {"X-Mobula-Session": session}
            client.post("/v1/chat/completions", json={**body, "seed": number}, headers=headers).raise_for_status()
            client.post(f"/v1/sessions/{session}/finish", json={"reward": float(number)}).raise_for_status()


def credit(rows: list[Any], outputs: list[Any]) -> float:
    """Sum of advantage times log-prob."""
    pairs = zip(rows, outputs, strict=True)
    return sum(float(np.dot(row.loss_fn_inputs["advantages"].data, out["logprobs"].data)) for row, out in pairs)


def test_captured_sessions_are_trained_and_the_example_runs(tmp_path: Path, port: int) -> None:
    model = TINY["qwen2.5"](tmp_path / "model")
    captured(model, tmp_path / "captured")
    rows = list(captured_rows(tmp_path / "captured"))
    assert len(rows) == 2
    with serving(model, tmp_path / "service", port), connect(port) as service:
        training = service.create_lora_training_client(str(model), rank=8, seed=1).result()
        outputs = training.forward_backward(rows, "ppo").result().loss_fn_outputs
        for row, output in zip(rows, outputs, strict=True):
            given = {name: np.array(value.data) for name, value in row.loss_fn_inputs.items()}
            is_sampled = given["advantages"] != 0
            assert is_sampled.sum() >= 1
            found = np.array(output["logprobs"].data)[is_sampled]
            # The engine never samples placeholders of media, which hold 1 % of this random model's probability.
            np.testing.assert_allclose(found, given["logprobs"][is_sampled], atol=0.02)
        training.optim_step(ADAM).result()
        assert credit(rows, training.forward(rows, "ppo").result().loss_fn_outputs) > credit(rows, outputs)
        environment = {**os.environ, "TINKER_BASE_URL": f"http://127.0.0.1:{port}", "TAUGHT": "2", "STEPS": "2"}
        done = subprocess.run([sys.executable, EXAMPLE], env=environment, timeout=300, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "accuracy after 2 steps of reinforcement learning" in done.stdout


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
