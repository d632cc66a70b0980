"""The `mobula` command: answers at once where it can, explains mistakes in one message, keeps its exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
import typer
from omegaconf import OmegaConf
from typer.testing import CliRunner, Result

from mobula.cluster.errors import DatasetError, DeadlineError
from mobula.cluster.roles import ReplayStats
from mobula.cluster.workers.status import InFlightSummary, Progress, RoleOutcome, RunStatus, WorkerState, WorkerStatus
from mobula.configs import overrides as keys
from mobula.configs.errors import ConfigError
from mobula.configs.load import dump_config, load_config, load_resolved
from mobula.configs.overrides import Override, groups, leaves, own_values, read_overrides
from mobula.configs.schema import RunConfig
from mobula.configs.schema.base import unread
from mobula.deploy.cli import app
from mobula.deploy.cli.options import takes
from mobula.deploy.doctor import this_machine as doctor
from mobula.deploy.doctor.this_machine import Verdict
from mobula.deploy.host.machine import Machine
from mobula.deploy.preloading.preloaded import Preloaded
from mobula.deploy.run import run_client
from mobula.deploy.run.run_client import Leftover, NotFreedError, RunAddress
from mobula.rewards.isolation.process import IsolatedProcess

GIB = 2**30

HEAVY = ("torch", "ray", "vllm", "transformers", "deepspeed")

GOOD = Machine(2, 0, 16 * GIB, 8 * GIB, frozenset({"avx2", "avx512f"}))


def mobula(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def refused(*words: str) -> str:
    """The message of a command that is not carried out."""
    result = mobula(*words)
    assert result.exit_code == 2, result.output
    return result.stderr


class FakeRuntime:
    """Stands where `mobula.deploy.run.runtime` does; remembers what it was asked."""

    def __init__(self, outcome: int | Exception) -> None:
        self.outcome = outcome
        self.trained: list[RunConfig] = []

    def train(self, config: RunConfig, preloaded: Preloaded | None = None) -> int:
        self.trained.append(config)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome

    def evaluate(self, config: RunConfig, output: Path | None, preloaded: Preloaded | None) -> int:
        return self.train(config)


def with_runtime(monkeypatch: pytest.MonkeyPatch, outcome: int | BaseException) -> FakeRuntime:
    runtime = FakeRuntime(outcome)
    monkeypatch.setitem(sys.modules, "mobula.deploy.run.runtime", runtime)
    monkeypatch.setattr("mobula.deploy.run.runtime", runtime, raising=False)
    return runtime


LIGHT = (
    "--help|train --help|show-config|show-config data=bad|show-config experiment=geometry3k|status --help|"
    "status no_such_run|scale --help|scale reward=2 no_such_run|doctor --leftovers|"
    "rehearse --help|score --help|lmms-eval --help|serve-training --help"
).split("|")


def test_light_commands_load_no_backend() -> None:
    """All of them in one process, which takes seconds to start."""
    program = (
        "import json, sys\n"
        "from mobula.deploy.cli import app\n"
        "loaded = {}\n"
        f"for command in {LIGHT!r}:\n"
        "    try: app(command.split())\n"
        "    except SystemExit: pass\n"
        f"    loaded[command] = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "print('loaded', json.dumps(loaded))"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(child.stdout.rpartition("loaded ")[2]) == {command: [] for command in LIGHT}


@dataclass(frozen=True, kw_only=True)
class Greeting:
    name: Annotated[str, typer.Argument()]
    words: Annotated[list[str], typer.Option("--word")] = field(default_factory=list)
    is_loud: Annotated[bool, typer.Option("--loud")] = False


def test_fields_of_a_dataclass_are_the_options_of_a_command() -> None:
    given: list[Greeting] = []
    own = typer.Typer()
    own.command()(takes(Greeting)(given.append))
    runner = CliRunner()
    for words in (["ada"], ["ada", "--word", "a", "--word", "b", "--loud"]):
        assert runner.invoke(own, words).exit_code == 0
    assert given == [Greeting(name="ada"), Greeting(name="ada", words=["a", "b"], is_loud=True)]
    assert runner.invoke(own, []).exit_code == 2


def test_show_config_prints_what_loads_back(tmp_path: Path) -> None:
    overrides = ["experiment=digit_sum", "learner.learning_rate=3e-4"]
    result = mobula("show-config", *overrides)
    (tmp_path / "config.yaml").write_text(result.stdout, encoding="utf-8")
    assert load_resolved(tmp_path / "config.yaml") == load_config(overrides)


def test_what_only_looks_at_a_configuration_needs_no_model_and_data_yet(tmp_path: Path) -> None:
    shown = mobula("show-config", "resources=gpu_1")
    assert shown.exit_code == 0 and "model: ???" in shown.stdout
    path = tmp_path / "config.yaml"
    path.write_text(shown.stdout, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"policy\.model is missing"):
        load_resolved(path)
    assert "`experiment=own policy.model=CHECKPOINT data.path=FOLDER`" in refused("train", "resources=gpu_1")


@pytest.mark.parametrize("command", ["train", "evaluate", "plan", "show-config", "doctor"])
def test_mistake_is_one_message_on_stderr_and_exit_code_2(command: str) -> None:
    result = mobula(command, "algorithm.kl.coeff=1")
    assert result.exit_code == 2
    assert result.stderr.strip() == "mobula: algorithm.kl.coeff is unknown: did you mean algorithm.kl.coef?"
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_runtime_gets_the_config_and_gives_the_exit_code(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    runtime = with_runtime(monkeypatch, 7)
    result = mobula(command, "experiment=digits", "algorithm.kl.coef=0.5", "resources=laptop")
    assert result.exit_code == 7
    assert [config.algorithm.kl.coef for config in runtime.trained] == [0.5]


@pytest.mark.parametrize(
    ("raised", "exit_code", "message"),
    [
        (DatasetError("data/x holds no rows"), 2, "data/x holds no rows"),
        (DeadlineError("waited 3 s for rollout/0"), 1, "waited 3 s for rollout/0"),
        (KeyboardInterrupt(), 130, "resume=auto"),
    ],
)
def test_run_that_ends_on_purpose_prints_why(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException, exit_code: int, message: str
) -> None:
    with_runtime(monkeypatch, raised)
    result = mobula("train", "experiment=digits")
    assert result.exit_code == exit_code
    assert message in result.stderr
    assert "Traceback" not in result.output
    with_runtime(monkeypatch, ZeroDivisionError("bug"))
    assert isinstance(mobula("train", "experiment=digits").exception, ZeroDivisionError)


def test_replay_reads_the_configuration_of_a_run_and_sets_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text(
        dump_config(load_config(["experiment=digits", "learner.learning_rate=3e-4"])), encoding="utf-8"
    )
    asked = []
    replaying = SimpleNamespace(replay=lambda folder, config: asked.append((folder, config)) or 5)
    monkeypatch.setitem(sys.modules, "mobula.deploy.data.replay", replaying)
    monkeypatch.setattr("mobula.deploy.data.replay", replaying, raising=False)
    words = ["replay", str(tmp_path), "algorithm.kl.coef=0.5", "rewards.components.0.weight=2"]
    assert mobula(*words).exit_code == 5
    [(folder, config)] = asked
    assert folder == tmp_path
    changed = (config.learner.learning_rate, config.algorithm.kl.coef, config.rewards.components[0].weight)
    assert changed == (3e-4, 0.5, 2)


def test_replay_without_a_run_is_one_message(tmp_path: Path) -> None:
    assert "there is no run in" in refused("replay", str(tmp_path))


def test_plan_lists_every_role() -> None:
    result = mobula("plan", "resources.num_cpus=1")
    assert result.exit_code in (0, 2), "a machine with less than two cores may refuse the preset"
    roles = ("learner", "rollout", "reference", "reward")
    assert all(role in result.stdout for role in roles) or "resources." in result.stderr


def test_plan_refuses_what_the_machine_cannot_hold() -> None:
    assert "resources.learner asks for 2 workers with 5000 CPUs" in refused("plan", "resources.learner.num_cpus=5000")


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_a_cluster_that_does_not_answer_is_named(command: str) -> None:
    result = mobula(command, "--address", "nowhere")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no Ray cluster answers at nowhere" in result.stderr


def test_init_model_writes_a_model_and_will_not_overwrite_one(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    result = mobula("init-model", "tiny-qwen2.5-vl", str(folder), "--seed", "3", "--tied")
    assert result.exit_code == 0
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert "not an empty folder" in refused("init-model", "tiny-qwen2.5-vl", str(folder))


def test_init_model_writes_a_flow_model_which_has_no_embeddings_to_tie(tmp_path: Path) -> None:
    result = mobula("init-model", "tiny-sd3", str(tmp_path / "sd3"), "--seed", "3")
    assert result.exit_code == 0 and "sampler=flow" in result.stdout
    assert (tmp_path / "sd3" / "transformer" / "diffusion_pytorch_model.safetensors").is_file()
    assert "no output embeddings to tie" in refused("init-model", "tiny-sd3", str(tmp_path / "other"), "--tied")


@pytest.mark.parametrize("seed", ["-1", str(2**32), "9" * 40])
def test_init_model_refuses_a_seed_that_no_run_could_have(tmp_path: Path, seed: str) -> None:
    folder = tmp_path / "model"
    assert "--seed" in refused("init-model", "tiny-qwen2.5-vl", str(folder), "--seed", seed)
    assert not folder.exists()


@pytest.mark.parametrize("name", ["tiny-none", "qwen3", "tiny-"])
def test_init_model_lists_what_it_can_write(tmp_path: Path, name: str) -> None:
    message = refused("init-model", name, str(tmp_path / "model"))
    assert "tiny-qwen3-vl" in message and "tiny-smolvlm" in message
    assert not (tmp_path / "model").exists()


def test_init_model_names_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused("init-model", "tiny-qwen2.5-vl", str(tmp_path / "file" / "model"))


def judged(check: Callable[..., doctor.Finding], *words: str, machine: Machine = GOOD) -> doctor.Finding:
    return check(load_config(["experiment=digits", *words]), machine)


@pytest.mark.parametrize(
    ("finding", "verdict"),
    [
        (doctor.check_python((3, 11)), Verdict.OK),
        (doctor.check_python((3, 13)), Verdict.MISSING),
        (judged(doctor.check_placement), Verdict.OK),
        (judged(doctor.check_placement, "resources=two_gpu"), Verdict.MISSING),
        (judged(doctor.check_memory), Verdict.OK),
        (judged(doctor.check_memory, "sampler.vllm.kv_cache_bytes=99999999999"), Verdict.MISSING),
        (judged(doctor.check_shared_memory), Verdict.OK),
        (judged(doctor.check_shared_memory, machine=Machine(2, 0, GIB, 1024, frozenset())), Verdict.WARNING),
        (judged(doctor.check_vector_units), Verdict.OK),
        (judged(doctor.check_vector_units, machine=Machine(2, 0, GIB, GIB, frozenset({"avx2"}))), Verdict.WARNING),
        (judged(doctor.check_vector_units, machine=Machine(2, 0, GIB, GIB, frozenset())), Verdict.MISSING),
        (judged(doctor.check_gpus), Verdict.OK),
        (judged(doctor.check_gpus, "resources=two_gpu"), Verdict.MISSING),
        (doctor.check_run_folder(Path("/proc/runs")), Verdict.MISSING),
        (doctor.check_loopback(), Verdict.OK),
        (doctor.check_package("yaml", "PyYAML", True, "install it"), Verdict.OK),
        (doctor.check_package("no_such_module", "none", True, "install it"), Verdict.MISSING),
        (doctor.check_package("no_such_module", "none", False, "install it"), Verdict.WARNING),
    ],
    ids=lambda value: f"{value.name}-{value.detail[:20]}" if isinstance(value, doctor.Finding) else str(value),
)
def test_doctor_judges_one_thing_at_a_time_and_names_what_to_do(finding: doctor.Finding, verdict: Verdict) -> None:
    assert finding.verdict is verdict
    assert finding.detail
    assert (finding.action == "") == (verdict is Verdict.OK)


def test_run_folder_that_is_not_there_yet_is_fine_and_stays_away(tmp_path: Path) -> None:
    assert doctor.check_run_folder(tmp_path / "a" / "b").verdict is Verdict.OK
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [([], {"vllm", "tensorboard"}), (["sampler=huggingface", "metrics.tensorboard=false"], set())],
)
def test_doctor_needs_only_what_the_config_uses(overrides: list[str], needed: set[str]) -> None:
    optional = {"vllm", "tensorboard", "peft"}
    packages = doctor.packages(load_config(["experiment=digits", *overrides]))
    found = {module for module, _, is_needed, _ in packages if is_needed}
    assert found & optional == needed


def test_doctor_fails_when_something_needed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "packages", lambda config: [("no_such_module", "none", True, "install it")])
    result = mobula("doctor")
    assert result.exit_code == 1
    assert "no_such_module" in result.stdout
    assert "-> install it" in result.stdout


REPLAY = ReplayStats(num_ready=3, num_taken=2, num_bytes=4096, oldest_age_s=0.5, oldest_id=None)
WORKER = WorkerStatus("reward/0", WorkerState.SERVING, None, 2, 0)
STATUS = RunStatus(
    "digits", Progress(3, "update", 1.5), 10, InFlightSummary(0, None, 0.0), REPLAY, (WORKER,), 0, 1, 2.0
)

DIGITS = RunAddress("digits", "10.0.0.1:6379", "digits")


class FakeRuns:
    """Stands where the run's answers come from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *outcomes: RoleOutcome) -> None:
        self.found: list[tuple[str | None, Path | None, str | None]] = []
        self.wanted: list[dict[str, int]] = []
        self._outcomes = outcomes
        monkeypatch.setattr(run_client, "find_run", self._find)
        monkeypatch.setattr(run_client, "read_status", lambda run, timeout_s: STATUS)
        monkeypatch.setattr(run_client, "scale", self._scale)

    def _find(self, name: str | None, folder: Path | None, address: str | None) -> RunAddress:
        self.found.append((name, folder, address))
        return DIGITS

    def _scale(self, run: RunAddress, wanted: dict[str, int], timeout_s: float) -> tuple[RoleOutcome, ...]:
        self.wanted.append(wanted)
        return self._outcomes


def test_status_shows_the_run_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = FakeRuns(monkeypatch)
    result = mobula("status", "digits", "--address", "10.0.0.1:6379")
    assert result.exit_code == 0
    assert "digits, step 3 of 10" in result.stdout and "reward/0" in result.stdout
    as_json = mobula("status", "--json", "--run", "some/run")
    assert json.loads(as_json.stdout)["progress"]["phase"] == "update"
    assert runs.found == [("digits", None, "10.0.0.1:6379"), (None, Path("some/run"), None)]


def test_status_of_a_run_that_never_began_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    (tmp_path / "runs" / "digits" / "config.yaml").write_text("name: digits\n")
    result = mobula("status", "digits")
    assert (result.exit_code, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1 and "run digits is not going on" in result.stderr


def test_scale_sends_every_role_and_prints_what_became_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = FakeRuns(monkeypatch, RoleOutcome("rollout", 4, ""), RoleOutcome("reward", 8, ""))
    result = mobula("scale", "rollout=4", "digits", "reward=8")
    assert result.exit_code == 0
    assert runs.wanted == [{"rollout": 4, "reward": 8}] and runs.found == [("digits", None, None)]
    assert "rollout=4 accepted" in result.stdout and "reward=8 accepted" in result.stdout


def test_a_refused_role_is_printed_with_the_reason_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRuns(monkeypatch, RoleOutcome("rollout", 4, ""), RoleOutcome("reward", 800, "no room on [any] node"))
    result = mobula("scale", "rollout=4", "reward=800")
    assert result.exit_code == 1
    assert "reward=800 no room on [any] node" in result.stdout


@pytest.mark.parametrize("words", [["digits"], ["reward=many"], ["reward=-1"], ["reward="], ["reward=2", "a", "b"]])
def test_a_scale_request_that_makes_no_sense_is_explained(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    runs = FakeRuns(monkeypatch)
    result = mobula("scale", "--", *words)
    assert result.exit_code == 2 and runs.wanted == []
    assert "mobula scale rollout=4 reward=8" in result.stderr


@pytest.mark.parametrize(
    "words", ["rollout=0", "reward=10001", "rollout=99999999999999999999999", "reward=" + "9" * 5000]
)
def test_a_number_that_no_role_can_have_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    runs = FakeRuns(monkeypatch)
    result = mobula("scale", "reference=2", words)
    assert result.exit_code == 2 and runs.found == []
    assert result.stderr.startswith(f"mobula: {words}: say how many workers (1 to 10000)")


def test_leftovers_are_listed_or_ended_by_id(monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(timeout_s: float) -> None:
        raise NotFreedError("it is stuck")

    ended: list[str] = []
    there = [
        Leftover("process-1-2", "digits", "sleep 1000", lambda timeout_s: ended.append("process-1-2")),
        Leftover("process-3-4", "sums", "python", stuck),
    ]
    monkeypatch.setattr(run_client, "find_leftovers", lambda address: there)
    listed = mobula("doctor", "--leftovers")
    assert listed.exit_code == 0 and ended == []
    assert "process-1-2  run digits: sleep 1000" in listed.stdout and "process-3-4" in listed.stdout
    freed = mobula("doctor", "--free", "process-1-2", "process-3-4")
    assert freed.exit_code == 1 and ended == ["process-1-2"]
    assert "process-1-2: freed" in freed.stdout and "process-3-4: it is stuck" in freed.stdout
    assert "process-9-9: no leftover has this id" in refused("doctor", "--free", "process-9-9")
    there.clear()
    assert "left nothing" in mobula("doctor", "--leftovers").stdout


REPOSITORY = Path(__file__).parents[3]

DOCS = sorted((REPOSITORY / "docs").glob("*.md"))

PAGES = [REPOSITORY / "README.md", *(page for page in DOCS if page.name != "CHANGELOG.md")]

COMPLETE = ("train", "evaluate")  # these need a model and data

OFFLINE = ("sft", "reward-model", "dpo")  # `mobula train` with an experiment

LOOKING = ("plan", "show-config", "doctor")

SHOWN_IN_DOCS = {"resources=gpu_4": "resources=two_gpu"}  # a page shows how to write this file, on top of the other

BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```|((?:^    .*\n)+)", re.DOTALL | re.MULTILINE)

SPAN = re.compile(r"`([^`]+)`")

COMMAND = re.compile(r"(?:^|-- )\s*(?:\.venv/bin/)?(mobula [a-z-]+.*|make train.*)$")

WORD = re.compile(r"[a-z_.0-9A-Z]+=\S+")


@dataclass(frozen=True)
class Command:
    """A command line as a page shows it; in running text a bare `mobula train` is only the command's name."""

    page: str
    text: str
    is_in_text: bool

    @property
    def tokens(self) -> list[str]:
        return shlex.split(self.text.rstrip("& "), comments=True)


def commands(page: Path) -> Iterator[Command]:
    text = page.read_text(encoding="utf-8")
    for block in BLOCK.findall(text):
        for line in "".join(block).replace("\\\n", " ").splitlines():
            found = COMMAND.search(line)
            if found:
                yield Command(page.name, found.group(1), is_in_text=False)
    for span in SPAN.findall(BLOCK.sub("", text)):
        found = COMMAND.match(" ".join(span.split()))
        if found:
            yield Command(page.name, found.group(1), is_in_text=True)


COMMANDS = [command for page in PAGES for command in commands(page)]


def configuration(command: Command, folder: Path) -> tuple[list[str], Any] | None:
    """The configuration words of a command and what they make; None if it takes none or is only named."""
    program, verb, *rest = command.tokens
    if program == "make":
        assert verb in ("train", "train-pretrained")
        shown = subprocess.run(["make", "-n", *command.tokens[1:]], cwd=REPOSITORY, capture_output=True, text=True)
        assert shown.returncode == 0, shown.stderr
        line = shown.stdout.replace("\\\n", " ").splitlines()[-1]
        _, verb, *rest = shlex.split(line)
    words = [SHOWN_IN_DOCS.get(word, word) for word in rest if WORD.fullmatch(word) or "=" in word and " " in word]
    names_run = verb in COMPLETE and rest and "=" not in rest[0]
    if command.is_in_text and not words or names_run or any(word.startswith("reproduce=") for word in words):
        return None  # the configuration is that of a run
    if verb in COMPLETE:
        return words, load_config(words)
    if verb in OFFLINE:
        job = [] if any(word.startswith("experiment=") for word in words) else [f"experiment={verb.replace('-', '_')}"]
        return words, load_config([*job, *words])
    if verb in LOOKING:
        return words, load_config(words, is_complete=False)
    if verb == "replay":
        path = folder / "config.yaml"
        path.write_text(dump_config(load_config(["experiment=digits"])), encoding="utf-8")
        return words, load_resolved(path, words)
    return None


def missing(values: Any, words: list[Override]) -> list[str]:
    """What words set and the values do not hold, apart from other words of the same command and unread sections."""
    sections = tuple(f"{name}." for name, *_ in unread(RunConfig, values))
    chosen = [dict(leaves(own_values(word.name, word.value)) if word.is_group else leaves(word.value, word.name))
              for word in words]  # fmt: skip
    return [
        f"{word.text}: {name}"
        for word, own in zip(words, chosen, strict=True)
        for name, value in own.items()
        if not name.startswith(sections)
        and not holds(value_at(values, name), computed(value, values))
        and not any(word.is_group and name in other for other in chosen if other is not own)
        and not any(other.name.startswith(f"{name}.") for other in words)  # a part of a list is set
    ]


def holds(value: Any, own: Any) -> bool:
    """Whether a value is what a file says; mappings in lists have the defaults of the schema besides."""
    if isinstance(value, list) and isinstance(own, list):
        return len(value) == len(own) and all(map(holds, value, own))
    if isinstance(value, dict) and isinstance(own, dict):
        return all(key in value and holds(value[key], item) for key, item in own.items())
    return bool(value == own)


def computed(value: Any, values: Any) -> Any:
    """The value of a file's interpolation, such as `${times:...}`, in a configuration of `values`."""
    return OmegaConf.create({**values, "value": value}).value if "${" in str(value) else value


def value_at(values: Any, name: str) -> Any:
    for part in name.split("."):
        values = values[int(part)] if isinstance(values, list) else values[part]
    return values


def test_commands_are_found_in_every_form() -> None:
    assert {command.tokens[1] for command in COMMANDS} >= {"train", "replay", "plan", "score"}
    assert any(command.text.startswith("make train") and "ARGS" in command.text for command in COMMANDS)
    assert any(command.is_in_text for command in COMMANDS) and not all(command.is_in_text for command in COMMANDS)


@pytest.mark.parametrize("page", sorted({command.page for command in COMMANDS}))
def test_every_word_of_a_documented_command_stands_in_its_result(page: str, tmp_path: Path) -> None:
    for command in COMMANDS:
        if command.page == page and (made := configuration(command, tmp_path)) is not None:
            words, config = made
            assert missing(json.loads(config.model_dump_json()), read_overrides(words)) == [], command.text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_word_in_the_text_names_a_key_or_an_option(page: Path) -> None:
    heads = {*groups(), *(name.partition(".")[0] for name in keys.known_keys())}
    spans = [span for span in SPAN.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))) if WORD.fullmatch(span)]
    words = [span for span in spans if re.split(r"[.=]", span)[0] in heads and not span.split("=")[1].isupper()]
    for word in words:
        read_overrides([SHOWN_IN_DOCS.get(word, word)])


PACKAGES = sorted({path.parent.name for path in REPOSITORY.glob("*/__init__.py")} - {"benchmarks"})


def run(words: list[str], folder: Path, python_path: str = "") -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = {"PYTHONPATH": python_path} if python_path else {}
    return subprocess.run([sys.executable, *words], cwd=folder, env=env | path, capture_output=True, text=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a module of each of our directories' names, none of which can be imported."""
    for name in PACKAGES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the module of the user')")
    return tmp_path


@pytest.mark.parametrize("on_path", [pytest.param(True, marks=pytest.mark.exhaustive), False])
def test_commands_work_in_a_project_with_files_of_such_names(project: Path, on_path: bool) -> None:
    words = ["-m", "mobula.deploy.cli", "show-config", "experiment=digits"]
    shown = run(words, project, str(project) if on_path else "")
    assert shown.returncode == 0, shown.stderr
    assert "prompts_per_step" in shown.stdout


@pytest.mark.parametrize("word", ["rewards:score", "{project}/rewards.py:score"])
def test_a_reward_function_may_be_in_a_module_of_such_a_name(project: Path, word: str) -> None:
    (project / "configs.py").write_text("HALF = 0.5\n")
    (project / "rewards.py").write_text("from configs import HALF\ndef score(x):\n    return x * HALF\n")
    program = (
        "from mobula.rewards.isolation.process import IsolatedProcess as P; import sys; "
        "p = P(timeout_s=20, start_timeout_s=60); print(p.call(sys.argv[1], 3.0)); p.close()"
    )
    shown = run(["-c", program, word.format(project=project)], project, str(project))
    assert shown.stdout.strip() == "1.5", shown.stderr


def test_a_checkout_that_is_not_installed_runs_its_own_code() -> None:
    """Without `site` no installed package is found."""
    program = "import sys; sys.path.insert(0, '.'); import deploy, mobula.cluster; print(mobula.cluster.__path__[0])"
    shown = run(["-S", "-c", program], REPOSITORY)
    assert shown.stdout.strip() == str(REPOSITORY / "cluster"), shown.stderr


def test_a_file_that_is_named_by_its_path_imports_its_siblings(tmp_path: Path) -> None:
    (tmp_path / "helpers_of_it.py").write_text("def half(x):\n    return x / 2\n")
    (tmp_path / "rewards.py").write_text("from helpers_of_it import half\ndef score(x):\n    return half(x)\n")
    process = IsolatedProcess(timeout_s=20, start_timeout_s=60)
    try:
        assert process.call(f"{tmp_path}/rewards.py:score", 3.0) == 1.5
    finally:
        process.close()
