"""Runs over seeds, and claims: which runs are made, what is compared, what holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from metrics_data import write_run
from rich.console import Console

from mobula.cluster.errors import PreflightError
from mobula.configs.load import dump_config, load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.report import claims


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[RunConfig]:
    """Runs whose accuracy after follows from learning rate and seed; the configurations that were trained."""
    found: list[RunConfig] = []
    monkeypatch.chdir(tmp_path)

    def train(command: str, config: RunConfig, words: Sequence[str]) -> None:
        assert (command, words) == ("train", [])
        found.append(config)
        write_run(config.run_folder, num_steps=8, seed=config.seed)
        (config.run_folder / "config.yaml").write_text(dump_config(config))
        path = config.run_folder / "summary.json"
        summary = json.loads(path.read_text())
        after = 0.5 + 100 * config.learner.learning_rate + 0.01 * config.seed
        path.write_text(json.dumps(summary | {"accuracy_before": 0.5, "accuracy_after": after}))

    monkeypatch.setattr(claims, "run_apart", train)
    return found


def claim(folder: Path, **changes: object) -> claims.Claim:
    fields = {
        "statement": "It learns.",
        "run": ["experiment=digits", "learner.learning_rate=2e-3"],
        "measure": "accuracy_after",
        "relation": ">",
        "against": "accuracy_before",
    }
    folder.mkdir(exist_ok=True)
    (folder / "own.yaml").write_text(json.dumps(fields | changes))
    [found] = claims.read_claims(["own"], folder)
    return found


LOW = ["experiment=digits", "learner.learning_rate=1e-3"]


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, True),
        ({"margin": 0.3}, False),
        ({"relation": "<"}, False),
        ({"against": LOW}, True),
        ({"against": LOW, "relation": "=", "margin": 0.2}, True),
        ({"against": LOW, "relation": "=", "margin": 0.05}, False),
        ({"measure": "late.entropy", "against": 0.0}, True),
        ({"against": 0.71}, False),  # 0.70, 0.71 and 0.72: as likely above as below
        ({"against": 0.5, "seeds": [4]}, True),
    ],
)
def test_a_claim_holds_if_the_interval_of_the_difference_says_so(
    changes: dict[str, object], holds: bool, tmp_path: Path
) -> None:
    verdict = claims.judged(claim(tmp_path / "claims", **changes), [])
    assert verdict.holds is holds, str(verdict)
    assert str(verdict).startswith("holds: It learns." if holds else "does not hold: It learns.")


def test_runs_are_made_once_and_another_configuration_is_another_run(tmp_path: Path, made: list[RunConfig]) -> None:
    own = claim(tmp_path / "claims", against=LOW)
    claims.judged(own, [])
    assert [config.seed for config in made] == [0, 0, 1, 1, 2, 2]
    claims.judged(own, [])
    assert len(made) == 6
    claims.judged(own, ["num_steps=9"])
    assert len(made) == 12 and made[-1].num_steps == 9


def test_an_interrupted_run_goes_on_and_the_others_stay(tmp_path: Path, made: list[RunConfig]) -> None:
    claims.judged(claim(tmp_path / "claims"), [])
    path = made[1].run_folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "stopped"}))
    claims.judged(claim(tmp_path / "claims"), [])
    assert [config.seed for config in made] == [0, 1, 2, 1]
    assert made[-1].resume == "auto" and made[-1].run_folder == made[1].run_folder


def test_verdicts_are_added_to_a_file_and_one_that_does_not_hold_is_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, console = tmp_path / "claims.json", Console(width=400)
    assert claims.check_claims([claim(tmp_path / "claims")], [], file, console) == 0
    assert claims.check_claims([claim(tmp_path / "claims", margin=0.9)], [], file, console) == 1
    [row] = json.loads(file.read_text())
    assert (row["name"], row["holds"], row["wanted"]) == ("own", False, "accuracy_after > accuracy_before by 0.9")
    assert "own holds: It learns. 0.7, 0.71, 0.72 against 0.5, 0.5, 0.5" in capsys.readouterr().out


def test_the_table_of_seeds_has_mean_error_and_range(made: list[RunConfig], capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config([*LOW, "seeds=[3,5]"])
    assert claims.train_seeds(config, Console(width=200)) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "accuracy after" in line)
    assert all(text in line for text in ("0.640", "0.010", "0.630 to 0.650", "0.630, 0.650"))
    assert [(config.seed, config.seeds) for config in made] == [(3, ()), (5, ())]


@pytest.mark.parametrize("name", [path.stem for path in sorted(claims.SHIPPED.glob("*.yaml"))])
def test_a_shipped_claim_is_of_runs_that_start(name: str) -> None:
    [found] = claims.read_claims([name], claims.SHIPPED)
    assert len(found.seeds) >= 3 and found.statement.endswith(".")
    for words in (found.run, found.against):
        if isinstance(words, tuple):
            load_config(list(words))


def test_a_name_or_a_file_that_is_no_claim_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="has no claim digitz: did you mean digits"):
        claims.read_claims(["digitz"], claims.SHIPPED)
    with pytest.raises(PreflightError, match=r"own\.yaml is no claim, which has the fields name, statement, run"):
        claim(tmp_path / "claims", relation=">=")


def test_a_number_that_the_run_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"has no number late\.no_such: name a key of its summary\.json"):
        claims.judged(claim(tmp_path / "claims", measure="late.no_such"), [])
