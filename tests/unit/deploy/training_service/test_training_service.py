"""The training service with the official client, also when it is killed or fails."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import httpx
import numpy as np
import pytest
import tinker
import torch
import training_server
from ray_apart import free_port
from service_client import KEY, connect, train_at, wait_until_up
from tinker.lib.public_interfaces.rest_client import RestClient
from training_server import NAME, running

types = tinker.types

ADAM = types.AdamParams(learning_rate=0.05)
train = partial(train_at, rate=0.05)
GREEDY = types.SamplingParams(max_tokens=3, temperature=0.0)
PROMPT = types.ModelInput.from_ints([1, 2])


def datum(tokens: list[int], weight: float = 1.0) -> Any:
    """A row whose every token is predicted from the ones before."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [weight] * (len(tokens) - 1)},
    )


ROWS = [datum([1, 2, 3, 4, 5]), datum([6, 7, 8])]

OTHER_ROWS = [datum([9, 8, 7, 6]), datum([2, 4, 6, 8])]


def learner_of(service: Any, seed: int = 1) -> Any:
    return service.create_lora_training_client(NAME, rank=4, seed=seed).result()


def test_client_trains_and_samples(tmp_path: Path) -> None:
    with running(tmp_path) as server, connect(server.url) as service:
        training = learner_of(service)
        assert training.get_info().lora_rank == 4
        losses = train(training, ROWS, 20)
        assert losses[-1] < 0.3 * losses[0]
        sampler = training.save_weights_and_get_sampling_client().result()
        response = sampler.sample(PROMPT, 2, GREEDY).result()
        assert [sequence.tokens for sequence in response.sequences] == [[3, 4, 5]] * 2
        outputs = training.forward(ROWS, "cross_entropy").result().loss_fn_outputs
        scored = sampler.compute_logprobs(types.ModelInput.from_ints([1, 2, 3, 4, 5])).result()
        assert scored[0] is None
        np.testing.assert_allclose(scored[1:], outputs[0]["logprobs"].data, atol=1e-5)


def test_more_weights_are_sampled_at_once_than_engines_serve(tmp_path: Path) -> None:
    with running(tmp_path) as server, connect(server.url) as service:
        server.engines.delay_s = 0.05
        training = learner_of(service)
        samplers, expected = [], []
        for _ in range(5):
            train(training, ROWS, 5)
            samplers.append(training.save_weights_and_get_sampling_client().result())
            expected.append(samplers[-1].sample(PROMPT, 1, GREEDY).result().sequences[0].tokens)
        answers = [sampler.sample(PROMPT, 1, GREEDY) for _ in range(3) for sampler in samplers]
        found = [answer.result().sequences[0].tokens for answer in answers]
        assert found == expected * 3
        assert len(server.engines.served) <= server.engines.max_served


def test_prompt_scores_and_top_tokens(tmp_path: Path) -> None:
    with running(tmp_path) as server, connect(server.url) as service:
        sampler = service.create_sampling_client(base_model=NAME).result()
        prompt, params = types.ModelInput.from_ints([1, 2, 3, 4]), types.SamplingParams(max_tokens=2, seed=3)
        scores = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2, "prompt_logprobs_last_n": 2}
        response = sampler.sample(prompt, 1, params, **scores).result()
        assert [value is None for value in response.prompt_logprobs] == [True, True, False, False]
        assert [best and len(best) for best in response.topk_prompt_logprobs] == [None, None, 2, 2]
        assert len(response.sequences[0].tokens) == len(response.sequences[0].logprobs)


def test_two_tenants_equal_each_alone_and_share_batches(tmp_path: Path) -> None:
    with running(tmp_path / "alone") as server, connect(server.url) as service:
        alone = [train(learner_of(service, seed), rows, 5) for seed, rows in ((1, ROWS), (2, OTHER_ROWS))]
    tokens = {"ada": "tml-the-key-of-tenant-ada", "bob": "tml-the-key-of-tenant-bob"}
    with (
        running(tmp_path / "both", tokens) as server,
        connect(server.url, tokens["ada"]) as ada,
        connect(server.url, tokens["bob"]) as bob,
    ):
        server.learner.delay_s = 0.05
        clients = [learner_of(service, seed) for service, seed in ((ada, 1), (bob, 2))]
        futures: list[list[Any]] = [[], []]
        for _ in range(5):
            for client, rows, losses in zip(clients, (ROWS, OTHER_ROWS), futures, strict=True):
                losses.append(client.forward_backward(rows, "cross_entropy"))
                client.optim_step(ADAM)
        together = [[future.result().metrics["loss:sum"] for future in losses] for losses in futures]
        assert any(len(set(batch)) == 2 for batch in server.learner.batches)
        np.testing.assert_allclose(together, alone, atol=1e-5)

        path = clients[0].save_state("mine").result().path
        with pytest.raises(tinker.NotFoundError):
            bob.create_training_client_from_state(path).result()
        asked, key = {"model_id": clients[0].model_id}, {"X-API-Key": tokens["bob"]}
        assert httpx.post(f"{server.url}/api/v1/get_info", json=asked, headers=key).status_code == 404
        with pytest.raises(tinker.AuthenticationError):
            connect(server.url, "tml-a-key-of-no-tenant-at-all").create_sampling_client(base_model=NAME).result()


def test_retried_requests_run_once(tmp_path: Path) -> None:
    with running(tmp_path) as server, connect(server.url) as service:
        training = learner_of(service)
        training.forward_backward(ROWS, "cross_entropy").result()
        body = {"model_id": training.model_id, "seq_id": 2, "adam_params": ADAM.model_dump()}
        answers = [httpx.post(f"{server.url}/api/v1/optim_step", json=body).json() for _ in range(3)]
        assert answers[0] == answers[1] == answers[2]
        result = httpx.post(f"{server.url}/api/v1/retrieve_future", json={"request_id": answers[0]["request_id"]})
        assert result.json()["metrics"]["step"] == 1
        assert server.learner.num_steps == 1


def test_custom_loss_equals_the_loss_of_the_service(tmp_path: Path) -> None:
    def loss(data: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        total = -torch.stack([values.sum() for values in logprobs]).sum()
        return total, {"own": 3.0}

    with running(tmp_path) as server, connect(server.url) as service:
        own, built_in = (learner_of(service) for _ in range(2))
        for _ in range(3):
            result = own.forward_backward_custom(ROWS, loss)
            own.optim_step(ADAM).result()
            assert result.result().metrics["own"] == 3.0
        train(built_in, ROWS, 3)
        after = [client.forward(ROWS, "cross_entropy").result().metrics["loss:sum"] for client in (own, built_in)]
        assert after[0] == pytest.approx(after[1], abs=1e-5)


def test_lost_learner_is_restored(tmp_path: Path) -> None:
    with running(tmp_path / "a") as server, connect(server.url) as service:
        expected = train(learner_of(service), ROWS, 8)
    with running(tmp_path / "b") as server, connect(server.url) as service:
        training = learner_of(service)
        losses = train(training, ROWS, 5)  # with a snapshot after 3 steps
        server.learner.adapters.clear()
        server.learner.failures.append(RuntimeError("a rank died"))
        losses += train(training, ROWS, 3)
        np.testing.assert_allclose(losses, expected, atol=1e-5)


@pytest.mark.parametrize(("kept_s", "status"), [(600, 200), (0, 410)])
def test_results_are_kept_until_they_are_old(tmp_path: Path, kept_s: float, status: int) -> None:
    with (
        running(tmp_path, kept_results=2, kept_in_memory=1, kept_results_s=kept_s) as server,
        connect(server.url) as service,
    ):
        training = learner_of(service)
        train(training, ROWS, 6)  # two requests each, with a snapshot after 3 steps
        answers = [
            httpx.post(f"{server.url}/api/v1/retrieve_future", json={"request_id": f"{training.model_id}:{number}"})
            for number in (1, 12)
        ]
    assert [answer.status_code for answer in answers] == [status, 200]
    assert status == 200 or "kept_results_s" in answers[0].text


def test_failed_gradient_is_discarded_and_harms_no_other(tmp_path: Path) -> None:
    with running(tmp_path / "a") as server, connect(server.url) as service:
        expected = train(learner_of(service), ROWS, 4)
    with running(tmp_path / "b") as server, connect(server.url) as service:
        training = learner_of(service)
        other = learner_of(service)
        losses = train(training, ROWS, 2)
        added = training.forward_backward(OTHER_ROWS, "cross_entropy")
        failed = training.forward_backward([datum([12, 13, 14])], "cross_entropy")
        refused = training.optim_step(ADAM)
        added.result()
        with pytest.raises(tinker.RequestFailedError, match="token 13"):
            failed.result()
        with pytest.raises(tinker.RequestFailedError, match="was discarded"):
            refused.result()
        losses += train(training, ROWS, 2)
        np.testing.assert_allclose(losses, expected, atol=1e-5)
        np.testing.assert_allclose(train(other, ROWS, 4), expected, atol=1e-5)


def test_checkpoints(tmp_path: Path) -> None:
    with running(tmp_path) as server, connect(server.url) as service:
        rest = RestClient(base_url=server.url, api_key=KEY)
        training = learner_of(service)
        train(training, ROWS, 2)
        path = training.save_state("two", user_metadata={"note": "kept"}).result().path
        losses = train(training, ROWS, 2)
        with pytest.raises(tinker.RequestFailedError, match="exists"):
            training.save_state("two").result()

        same = service.create_training_client_from_state_with_optimizer(path).result()
        np.testing.assert_allclose(train(same, ROWS, 2), losses, atol=1e-5)
        fresh = service.create_training_client_from_state(path).result()
        without = train(fresh, ROWS, 2)
        assert without[0] == pytest.approx(losses[0], abs=1e-5)
        assert without[1] != pytest.approx(losses[1], abs=1e-5)

        listed = rest.list_checkpoints(training.model_id).result().checkpoints
        assert [(c.checkpoint_id, c.user_metadata) for c in listed] == [("weights/two", {"note": "kept"})]
        copied = rest.copy_weights(path, "archive").result()
        assert rest.get_weights_info_by_tinker_path(copied).result().lora_rank == 4
        rest.delete_checkpoint_from_tinker_path(path).result()
        assert rest.list_checkpoints(training.model_id).result().checkpoints == []
        np.testing.assert_allclose(
            train(service.create_training_client_from_state_with_optimizer(copied).result(), ROWS, 2), losses, atol=1e-5
        )
        assert len(rest.list_training_runs().result().training_runs) == 5

        exported = training.save_weights_external("out").result().path
        urls = rest.get_external_weights_urls(exported).result().urls
        [(name, url)] = urls.items()
        with urlopen(url) as response:
            assert name == "adapter_model.safetensors"
            assert len(response.read()) > 900


def test_unsupported_requests_fail_with_a_reason(tmp_path: Path) -> None:
    with running(tmp_path) as server, connect(server.url) as service:
        training = learner_of(service)
        row = ROWS[0].model_input
        refused = [
            (training.forward_backward(ROWS, "gspo"), "gspo"),
            (training.optim_step(types.DimuonParams(learning_rate=0.1)), "discarded"),
            (training.optim_step(types.DimuonParams(learning_rate=0.1)), "dimuon"),
            (training.forward_backward(ROWS, "ppo"), "lacks advantages"),
            (training.forward(ROWS, "cross_entropy", {"beta": 1.0}), "beta"),
            (training.forward([types.Datum(model_input=row, loss_fn_inputs={})], "cross_entropy"), "target_tokens"),
            (training.forward([datum([1, 99])], "cross_entropy"), "99|outside"),
            (training.save_weights_external("x", age_encryption_recipients=["age1"]), "encryption"),
        ]
        for future, reason in refused:
            with pytest.raises(tinker.RequestFailedError, match=reason) as failure:
                future.result()
            assert failure.value.category == types.RequestErrorCategory.User
        with pytest.raises(tinker.BadRequestError, match="another/model"):
            service.create_lora_training_client("another/model", rank=4).result()
        with pytest.raises(tinker.BadRequestError, match="rank=65"):
            service.create_lora_training_client(NAME, rank=65).result()
        sampler = service.create_sampling_client(base_model=NAME).result()
        with pytest.raises(tinker.RequestFailedError, match="topk_sample_logprobs"):
            sampler.sample(row, 1, types.SamplingParams(max_tokens=1), topk_sample_logprobs=2).result()


def test_inflight_weights_change_under_a_sampler(tmp_path: Path) -> None:
    with running(tmp_path) as server, connect(server.url) as service:
        training = learner_of(service)
        fixed = training.save_weights_and_get_sampling_client().result()
        changing = training.save_weights_and_get_sampling_client(kind="inflight").result()
        before = fixed.sample(PROMPT, 1, GREEDY).result().sequences[0].tokens
        train(training, ROWS, 20)
        training.save_weights_and_get_sampling_client(kind="inflight").result()
        assert fixed.sample(PROMPT, 1, GREEDY).result().sequences[0].tokens == before
        assert changing.sample(PROMPT, 1, GREEDY).result().sequences[0].tokens == [3, 4, 5]


def test_failed_engine_is_asked_again(tmp_path: Path) -> None:
    with running(tmp_path) as server, connect(server.url) as service:
        sampler = service.create_sampling_client(base_model=NAME).result()
        server.engines.failures.append(RuntimeError("an engine died"))
        response = sampler.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=2)).result()
        assert response.sequences[0].tokens


def test_limits_of_models_and_queues(tmp_path: Path) -> None:
    with running(tmp_path, max_models=1, max_queued=2) as server, connect(server.url) as service:
        training = learner_of(service)
        with pytest.raises(tinker.BadRequestError, match="1 models are active"):
            service.create_lora_training_client(NAME, rank=4).result()

        def step(seq_id: int) -> int:
            body = {"model_id": training.model_id, "seq_id": seq_id, "adam_params": ADAM.model_dump()}
            return httpx.post(f"{server.url}/api/v1/optim_step", json=body).status_code

        assert [step(seq_id) for seq_id in (2, 3, 4)] == [200, 200, 429]  # they wait for number 1
        assert step(1) == 200, "the request that the others wait for is always accepted"


def test_closed_session_frees_the_learner_and_continues_on_demand(tmp_path: Path) -> None:
    with running(tmp_path, max_models=1) as server:
        with connect(server.url) as service:
            training = learner_of(service)
            train(training, ROWS, 2)
            path = training.save_state("end").result().path
        assert server.learner.adapters == {}
        with connect(server.url) as service:
            train(service.create_training_client_from_state(path).result(), ROWS, 1)


DELAY_S = 0.15


def start(folder: Path, port: int) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, training_server.__file__, str(folder), str(port), str(DELAY_S)]
    process = subprocess.Popen(arguments, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        wait_until_up(process, port, 60)
    except BaseException:
        kill(process)
        raise
    return process


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(10)


def test_killed_service_completes_the_futures_of_its_clients(tmp_path: Path) -> None:
    with running(tmp_path / "whole") as server, connect(server.url) as service:
        expected = train(learner_of(service), ROWS, 12)
    port = free_port()
    process = start(tmp_path / "killed", port)
    try:
        service = connect(f"http://127.0.0.1:{port}")
        training = learner_of(service)
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

        samples = sampler.result().sample(PROMPT, 1, GREEDY)
        time.sleep(DELAY_S / 3)
        kill(process)
        process = start(tmp_path / "killed", port)
        assert len(samples.result().sequences[0].tokens) == 3
    finally:
        kill(process)


def test_failure_of_the_service_fails_open_requests_and_a_restart_starts_from_the_last_step(tmp_path: Path) -> None:
    with running(tmp_path / "whole") as server, connect(server.url) as service:
        expected = train(learner_of(service), ROWS, 4)
    port = free_port()
    with running(tmp_path / "failed", port=port) as server:
        service = connect(server.url)
        training = learner_of(service)
        losses = train(training, ROWS, 2)
        training.forward_backward(ROWS, "cross_entropy").result()  # discarded with the step that fails
        server.learner.step = unreadable_step  # type: ignore[method-assign, assignment]
        pending = [training.optim_step(ADAM)]
        pending += [training.forward_backward(ROWS, "cross_entropy"), training.optim_step(ADAM)]
        for future in pending:
            with pytest.raises(tinker.RequestFailedError, match="the training service has failed.*start it again") as e:
                future.result(timeout=20)
            assert e.value.category == types.RequestErrorCategory.Server
        assert httpx.get(f"{server.url}/health").status_code == 503
        body = {"model_id": training.model_id, "seq_id": 99, "adam_params": ADAM.model_dump()}
        assert httpx.post(f"{server.url}/api/v1/optim_step", json=body).status_code == 503
    with running(tmp_path / "failed", port=port) as server:
        losses += train(training, ROWS, 2)
    np.testing.assert_allclose(losses, expected, atol=1e-5)


async def unreadable_step(adapter: str, parameters: object) -> None:
    """A step whose answer the service cannot read. It takes long enough for the next request to arrive."""
    await asyncio.sleep(1)
