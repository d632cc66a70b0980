"""A training service that is killed while clients wait for it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
import training_server
from test_training_service import ADAM, KEY, NAME, ROWS, train

DELAY_S = 0.15


def start(folder: Path, port: int) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, training_server.__file__, str(folder), str(port), str(DELAY_S)]
    process = subprocess.Popen(arguments, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    wait_for(lambda: is_up(port), process)
    return process


def is_up(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").is_success
    except httpx.TransportError:
        return False


def wait_for(is_true: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert process.poll() is None and time.monotonic() < deadline, "the service does not start"
        time.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(10)


def test_killed_service_completes_the_futures_of_its_clients(tmp_path: Path) -> None:
    with training_server.running(tmp_path / "whole") as server:
        with tinker.ServiceClient(base_url=server.url, api_key=KEY) as service:
            expected = train(service.create_lora_training_client(NAME, rank=4, seed=1).result(), ROWS, 12)
    port = free_port()
    process = start(tmp_path / "killed", port)
    try:
        service = tinker.ServiceClient(base_url=f"http://127.0.0.1:{port}", api_key=KEY)
        training = service.create_lora_training_client(NAME, rank=4, seed=1).result()
        computed, stepped = [], []
        for _ in range(12):
            computed.append(training.forward_backward(ROWS, "cross_entropy"))
            stepped.append(training.optim_step(ADAM))
        sampler = training.save_weights_and_get_sampling_client()
        for pending in (computed[2], stepped[6]):  # the rest is queued, or not yet sent
            pending.result()
            kill(process)
            process = start(tmp_path / "killed", port)
        losses = [future.result().metrics["loss:sum"] for future in computed]
        assert [future.result().metrics["step"] for future in stepped] == list(range(1, 13))
        np.testing.assert_allclose(losses, expected, atol=1e-5)

        params = tinker.types.SamplingParams(max_tokens=3, temperature=0.0)
        samples = sampler.result().sample(tinker.types.ModelInput.from_ints([1, 2]), 1, params)
        time.sleep(DELAY_S / 3)
        kill(process)
        process = start(tmp_path / "killed", port)
        assert len(samples.result().sequences[0].tokens) == 3
    finally:
        kill(process)


def test_failure_of_the_service_fails_open_requests_and_a_restart_starts_from_the_last_step(tmp_path: Path) -> None:
    with training_server.running(tmp_path / "whole") as server:
        with tinker.ServiceClient(base_url=server.url, api_key=KEY) as service:
            expected = train(service.create_lora_training_client(NAME, rank=4, seed=1).result(), ROWS, 4)
    port = free_port()
    with training_server.running(tmp_path / "failed", port=port) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        training = service.create_lora_training_client(NAME, rank=4, seed=1).result()
        losses = train(training, ROWS, 2)
        training.forward_backward(ROWS, "cross_entropy").result()  # discarded with the step that fails
        server.learner.step = unreadable_step  # type: ignore[method-assign, assignment]
        pending = [training.optim_step(ADAM)]
        pending += [training.forward_backward(ROWS, "cross_entropy"), training.optim_step(ADAM)]
        for future in pending:
            with pytest.raises(tinker.RequestFailedError, match="the training service has failed.*start it again") as e:
                future.result(timeout=20)
            assert e.value.category == tinker.types.RequestErrorCategory.Server
        assert httpx.get(f"{server.url}/health").status_code == 503
        body = {"model_id": training.model_id, "seq_id": 99, "adam_params": ADAM.model_dump()}
        assert httpx.post(f"{server.url}/api/v1/optim_step", json=body).status_code == 503
    with training_server.running(tmp_path / "failed", port=port) as server:
        losses += train(training, ROWS, 2)
    np.testing.assert_allclose(losses, expected, atol=1e-5)


async def unreadable_step(adapter: str, parameters: object) -> None:
    """A step whose answer the service cannot read. It takes long enough for the next request to arrive."""
    await asyncio.sleep(1)
