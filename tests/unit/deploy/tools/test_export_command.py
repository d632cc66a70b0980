"""`mobula export` finds run and checkpoint, writes the policy whole or not at all, and names what is wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from learner_data import tiny_config
from safetensors.torch import load_file
from typer.testing import CliRunner

from mobula.cluster.recovery.checkpoints import Checkpoints, CheckpointSchedule
from mobula.configs.load import dump_config
from mobula.configs.schema import RunConfig
from mobula.configs.schema.run import Resume
from mobula.deploy.cli.commands import app
from mobula.learner.learner import Learner
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

LORA = ("policy.lora.rank=4", "learner=fsdp2")  # the learner below is one process; what it saves has the same layout


class OneRank:
    """A learner as checkpoints see it."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner

    async def save(self, folder: Path) -> None:
        self.learner.save(folder)

    async def finish_save(self) -> bool:
        self.learner.finish_save()
        return True

    async def load(self, folder: Path) -> int:
        return self.learner.load(folder)


def run_folder(folder: Path, config: RunConfig, steps: tuple[int, ...] = ()) -> Path:
    """A run with a checkpoint of each of `steps`, before which some weight grew by 1."""
    run = folder / "run"
    run.mkdir()
    (run / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    single = config.model_copy(update={"learner": config.learner.model_copy(update={"backend": "single"})})
    learner = Learner(single, 0, 1, ())
    learner.connect("")

    async def nothing() -> None: ...

    checkpoints = Checkpoints(
        run / "checkpoints",
        learner=OneRank(learner),
        parts={},
        prepare=nothing,
        finish=nothing,
        identity={},
        resume=Resume.AUTO,
        schedule=CheckpointSchedule(1, 9, 9),
    )
    trained = next(p for name, p in learner._policy.named_parameters() if p.requires_grad and "lora_A" not in name)
    for step in steps:
        trained.data += 1.0
        learner.version = step
        asyncio.run(checkpoints.save(step))
    return run


def exported(*words: object) -> str:
    """What the command prints; it must end with exit code 0."""
    result = CliRunner().invoke(app, ["export", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*words: object) -> str:
    result = CliRunner().invoke(app, ["export", *map(str, words)])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.stderr.split())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0)


def moved(folder: Path, model: Path) -> float:
    """How far the weights of an export are from the model's, at most."""
    ours, theirs = load_file(folder / "model.safetensors"), load_file(model / "model.safetensors")
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def test_the_newest_checkpoint_or_a_chosen_one_is_written_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_folder(tmp_path, tiny_config(model), (0, 2))
    assert "step 2 of" in exported(run)
    assert moved(run / "export" / "step-000002", model) == pytest.approx(2)
    exported(run, "--step", 0, "--output", tmp_path / "own")
    assert moved(tmp_path / "own", model) == pytest.approx(1)
    assert "step-000002 exists: give another folder with --output" in refused(run)
    assert sorted(path.name for path in (run / "export").iterdir()) == ["step-000002"], "nothing half written"
    (tmp_path / "runs").mkdir()
    run.rename(tmp_path / "runs" / "named")
    monkeypatch.chdir(tmp_path)
    assert "step 2 of runs/named" in exported("named", "--output", "by-name")


def test_adapters_are_written_alone_or_merged(model: Path, tmp_path: Path) -> None:
    run = run_folder(tmp_path, tiny_config(model, *LORA), (1,))
    assert "a PEFT adapter of" in exported(run)
    factors = load_file(run / "export" / "step-000001-adapter" / "adapter_model.safetensors")
    assert any(torch.equal(tensor, torch.ones_like(tensor)) for name, tensor in factors.items() if "lora_B" in name)
    exported(run, "--merge")
    assert moved(run / "export" / "step-000001", model) > 1e-3


def test_what_cannot_be_exported_is_named_with_the_next_action(model: Path, tmp_path: Path) -> None:
    message = refused(tmp_path / "nothing")
    assert (
        f"there is no run in {tmp_path / 'nothing'} or" in message and "give the run's FOLDER, or its NAME" in message
    )
    run = run_folder(tmp_path, tiny_config(model))
    assert "holds no complete checkpoint: wait for the first one" in refused(run)
    assert "no checkpoint of step 7; it has these steps: none" in refused(run, "--step", 7)
    assert "no adapters to merge (policy.lora.rank=0): leave out --merge" in refused(run, "--merge")


def test_a_damaged_checkpoint_and_a_step_that_is_not_there_are_named(model: Path, tmp_path: Path) -> None:
    run = run_folder(tmp_path, tiny_config(model), (0, 1))
    assert "no checkpoint of step 7; it has these steps: 0, 1" in refused(run, "--step", 7)
    [file] = (run / "checkpoints" / "step-000001" / "learner").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    assert "step-000001 is not complete" in refused(run, "--step", 1)
    assert "step 0 of" in exported(run), "the newest complete one"


def test_a_model_that_is_gone_is_named_and_nothing_is_left(model: Path, tmp_path: Path) -> None:
    run = run_folder(tmp_path, tiny_config(model), (0,))
    config = tiny_config(model).model_copy(update={"policy": tiny_config(tmp_path / "gone").policy})
    (run / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    message = refused(run)
    assert f"policy.model={tmp_path / 'gone'}" in message and "can be read from here" in message
    assert list((run / "export").iterdir()) == []
