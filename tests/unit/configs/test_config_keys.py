"""Keys of the configuration: each is documented and reaches the run; keys of offline jobs and of the guard."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from mobula.cluster.runtime.placement import needed_roles
from mobula.configs.errors import ConfigError
from mobula.configs.load import dump_config, load_config, load_resolved
from mobula.configs.near_paths import may_be_hub_name, near
from mobula.configs.on_resume import BY_NAME, DECLARED, OnResume, on_resume
from mobula.configs.overrides import EXAMPLES, FOLDER, TASKS_VARIABLE, groups, known_keys, roots
from mobula.configs.rules.run import guard_signs
from mobula.configs.schema import RunConfig
from mobula.configs.schema.base import Section
from mobula.configs.schema.rollout import VLLMConfig
from mobula.deploy.cli import app


def test_a_preset_for_another_kind_is_dropped(tmp_path: Path) -> None:
    config = load_config(["experiment=digits", "resources=two_gpu", "sampler=huggingface"])
    assert config.sampler.vllm == VLLMConfig()
    assert load_config(["experiment=digits", "resources=two_gpu"]).sampler.vllm.kv_cache_bytes == 0
    dumped = dump_config(config)
    assert not {"vllm", "flow", "image_tokens"} & yaml.safe_load(dumped)["sampler"].keys()
    path = tmp_path / "config.yaml"
    path.write_text(dumped)
    assert load_resolved(path) == config
    path.write_text(dumped.replace("kind: huggingface\n", "kind: huggingface\n  vllm: {block_size: 16}\n"))
    with pytest.raises(ConfigError, match=r"sampler\.vllm is not read with sampler\.kind=huggingface"):
        load_resolved(path)


def test_own_code_reads_the_section_of_every_kind() -> None:
    config = load_config(["experiment=digits", "sampler.kind=own.py:Sampler", "sampler.vllm.block_size=16"])
    assert isinstance(config, RunConfig) and config.sampler.vllm.block_size == 16


def test_the_first_missing_part_and_similar_names_are_shown(tmp_path: Path) -> None:
    (tmp_path / "models" / "SmolLM2-135M").mkdir(parents=True)
    (tmp_path / "runs").mkdir()
    (tmp_path / "models" / "train.json").write_text("")
    models = tmp_path / "models"
    assert near(tmp_path / "modles" / "SmolLM2-135M") == f" ({tmp_path} has no modles; near: {models})"
    assert near(models / "smollm2-135m") == f" ({models} has no smollm2-135m; near: {models / 'SmolLM2-135M'})"
    assert near(models / "train.jsonl") == f" ({models} has no train.jsonl; near: {models / 'train.json'})"
    assert near(models / "other") == f" ({models} has no other)"
    assert near(models / "train.json" / "x") == f" ({models / 'train.json'} is a file)"
    assert near(models) == ""


def test_a_relative_path_names_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    assert near(Path("date/x")) == f" ({tmp_path} has no date; near: data)"


@pytest.mark.parametrize(
    ("name", "may_be"),
    [
        *[(name, True) for name in ("gpt2", "Qwen/Qwen2.5-VL-3B-Instruct")],
        *[(name, False) for name in ("/models/qwen", "./models", "a/b/c", "no name", "~/models", "models/")],
    ],
)
def test_names_of_the_hub_have_one_slash_at_most(name: str, may_be: bool) -> None:
    assert may_be_hub_name(name) is may_be


SECRET = re.compile(r"token|secret|password|passwd|credential|api_?key|auth", re.IGNORECASE)
OF_THE_MODEL = re.compile(r"(^|_)tokens?(_|$)")  # what a language model reads and writes


def names(section: type[Section]) -> list[str]:
    """Every name of a field below a section, `_env` aside: that is the name of a variable."""
    found = []
    for name, field in section.model_fields.items():
        found.append(name)
        stack = [field.annotation]
        while stack:
            part = stack.pop()
            stack += getattr(part, "__args__", ())
            if isinstance(part, type) and issubclass(part, Section):
                found += names(part)
    return found


def test_no_key_is_for_a_secret() -> None:
    known = names(RunConfig)
    assert len(known) > 150
    assert [n for n in known if SECRET.search(n) and not OF_THE_MODEL.search(n) and not n.endswith("_env")] == []


def test_an_address_with_credentials_is_refused_without_repeating_them() -> None:
    address = "metrics.tracker_address=https://me:s3cret@tracker.example"
    with pytest.raises(ConfigError, match="has credentials for tracker.example") as refused:
        load_config(["experiment=digits", "metrics.trackers=[mlflow]", address])
    assert "s3cret" not in str(refused.value)


# In these sections each key is declared by itself: most of them shape the state of a checkpoint.
BY_ITSELF = ("policy", "learner")


def test_every_key_is_declared() -> None:
    undeclared = [key for key in known_keys() if on_resume(key) is None and not _holds_declared(key)]
    assert undeclared == [], "add them to configs/on_resume.yaml"


def test_keys_that_shape_a_checkpoint_are_declared_one_by_one() -> None:
    found = [key for key, info in known_keys().items() if key.split(".")[0] in BY_ITSELF and info.section is None]
    assert [key for key in found if key not in BY_NAME] == [], "add them to configs/on_resume.yaml"


def test_what_is_declared_is_a_key_and_is_declared_once() -> None:
    assert [name for name in BY_NAME if name not in known_keys()] == []
    assert len(BY_NAME) == sum(len(names) for names in DECLARED.values())


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        *[(key, OnResume.REFUSED) for key in ("policy.lora.rank", "policy.lora.alpha", "learner.optimizer")],
        *[(key, OnResume.REFUSED) for key in ("data.curriculum.key", "resources.dtype")],
        *[(key, OnResume.NAMED) for key in ("learner.learning_rate", "rewards.components")],
        *[(key, OnResume.NAMED) for key in ("algorithm.losses.ppo_clip.clip_low", "data.system_prompt")],
        *[(key, OnResume.FREE) for key in ("resources.rollout.num_workers", "metrics.tensorboard")],
        ("nowhere.key", None),
    ],
)
def test_the_longest_declared_name_counts(key: str, kind: OnResume | None) -> None:
    assert on_resume(key) is kind


def _holds_declared(key: str) -> bool:
    return any(name.startswith(f"{key}.") for name in BY_NAME)


OWN = ["experiment=own", "policy.model=m", "data.path=d"]
BOXED = r" Answer in \boxed{}."


@pytest.mark.parametrize(
    ("words", "suffix"),
    [
        *[(words, BOXED) for words in ([], ["data=parquet"], ["data=webdataset"], ["data=huggingface"])],
        (["rewards=exact_match", "rewards.components.0.options.extract=boxed"], BOXED),
        (["rewards=maye"], BOXED),
        (["rewards.components.0.weight=0", "rewards.components.1.weight=1"], BOXED),
        (["rewards.components.0.options.require_boxed=false", "rewards.components.1.weight=1"], BOXED),
        *[(words, "") for words in (["data=messages"], ["rewards=exact_match"])],
        *[(words, "") for words in (["rewards.components.0.options.require_boxed=false"], ["data.prompt_suffix=''"])],
        (["rewards=exact_match", "data.prompt_suffix=' Be brief.'"], " Be brief."),
    ],
)
def test_the_reward_decides_what_is_put_behind_a_question(words: list[str], suffix: str) -> None:
    assert load_config([*OWN, *words]).question_suffix == suffix


def test_a_reward_of_ones_own_changes_no_question() -> None:
    mine = "{name: mine, function: f.py:f, weight: 1.0}"
    config = load_config([*OWN, f"rewards.components=[{mine}]", "rewards.accuracy_component=mine"])
    assert (config.data.prompt_suffix, config.question_suffix) == ("auto", "")


def test_questions_that_name_their_own_form_get_no_suffix() -> None:
    assert load_config(["experiment=digits"]).question_suffix == ""
    assert load_config(["experiment=sft", "policy.model=m", "data.path=d"]).question_suffix == ""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of `examples/sums` under another name, in a directory whose name needs quotes."""
    folder = tmp_path / "it's, my task"
    for group in ("data", "experiment"):
        folder.joinpath(group).mkdir(parents=True)
        shutil.copy(EXAMPLES / "sums" / group / "sums.yaml", folder / group / "products.yaml")
    experiment = folder / "experiment" / "products.yaml"
    experiment.write_text(experiment.read_text().replace("/data: sums", "/data: products"))
    data = folder / "data" / "products.yaml"
    data.write_text(data.read_text().replace("data/sums", "data/products"))
    monkeypatch.setenv(TASKS_VARIABLE, str(folder))
    caches = (roots, groups)
    for cached in caches:
        cached.cache_clear()
    yield folder
    for cached in caches:
        cached.cache_clear()


def test_an_experiment_of_the_user_chooses_data_of_the_user(task: Path) -> None:
    config = load_config(["experiment=products"])
    assert config.data.path == Path("data/products")
    assert config.data.writer == "examples/sums/sums.py:write_sums"
    assert {"products", "sums"} <= set(groups()["experiment"])


def test_an_option_with_a_built_in_name_is_refused(task: Path) -> None:
    (task / "data" / "jsonl.yaml").write_text("kind: jsonl\n")
    with pytest.raises(ConfigError, match=r"data/jsonl\.yaml has the name of a built-in option of data: rename it"):
        load_config(["experiment=digits"])


def test_a_missing_directory_is_refused(task: Path) -> None:
    shutil.rmtree(task)
    with pytest.raises(ConfigError, match="which is no directory: correct or unset it"):
        load_config(["experiment=digits"])


# Offline jobs: their presets load, and what contradicts them is refused with the next action.

ROWS = ("algorithm.supervised.path=x", "algorithm.supervised.coef=1")
GIVEN = ("policy.model=x", "data.path=y")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dpo", "experiment=digits"], "offline.job=none with experiment=digits: use `mobula train`, or name an"),
        (["reward-model", "experiment=dpo_rlaif_v"], "experiment whose offline.job is reward_model"),
    ],
)
def test_a_command_refuses_an_experiment_of_another_job(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("command", "experiment"), [("dpo", "dpo"), ("dpo", "dpo_rlaif_v"), ("reward-model", "reward_model_rlaif_v")]
)
def test_a_command_trains_the_experiment_of_its_job_or_the_one_that_is_named(
    monkeypatch: pytest.MonkeyPatch, command: str, experiment: str
) -> None:
    found: list[RunConfig] = []
    monkeypatch.setattr("mobula.deploy.run.runtime.train", lambda config, preloaded: found.append(config) or 0)
    named = [] if experiment == "dpo" else [f"experiment={experiment}"]
    result = CliRunner().invoke(app, [command, *named, "policy.model=m", "data.path=d", "num_steps=3"])
    assert result.exit_code == 0, result.output
    assert [(config.name, config.num_steps) for config in found] == [(experiment, 3)]


@pytest.mark.parametrize(
    ("job", "rows", "more_roles"),
    [("sft", "conversation", []), ("reward_model", "pair", []), ("dpo", "pair", ["reference"])],
)
def test_a_preset_starts_the_roles_of_its_job(job: str, rows: str, more_roles: list[str]) -> None:
    config = load_config([f"experiment={job}", *GIVEN])
    assert (config.offline.job, config.offline.rows, config.offline.is_on) == (job, rows, True)
    assert list(needed_roles(config)) == ["learner", *more_roles]
    preset = Path(FOLDER / "experiment" / f"{job}.yaml").read_text()
    assert len(preset.splitlines()) <= 25


def test_scored_rows_are_those_of_regression() -> None:
    words = ("experiment=reward_model", "offline.reward_model.loss=regression", *GIVEN)
    assert load_config(words).offline.rows == "scored"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("experiment=sft", "data=jsonl"), "offline.job=sft trains on conversations, and data.kind=jsonl .*data=chat"),
        (("data=chat",), "data.kind=chat holds conversations.*mobula sft"),
        (("experiment=dpo", "data.prompt_suffix=' x'"), "data.prompt_suffix=' x' is put behind questions"),
        (("experiment=sft", "algorithm.kl.coef=0.1"), "algorithm.kl.coef=0.1: set algorithm.kl.coef=0"),
        (("experiment=sft", "data.curriculum.kind=easy_first"), "data.curriculum.kind=easy_first: set .*kind=none"),
        (("experiment=sft", "warm_start=supervised"), "warm_start.num_steps=200: set warm_start.num_steps=0"),
        (("experiment=sft", "replay.journal=true"), "replay.journal=true: set replay.journal=false"),
        (("experiment=dpo", "sampler.temperature=0.5"), "sampler.temperature=0.5: set sampler.temperature=1"),
        (("experiment=sft", "offline.batch_size=1"), "offline.batch_size=1 leaves some"),
        (("experiment=dpo", "offline.dpo.loss=ipo", "offline.dpo.label_smoothing=0.1"), "offline.dpo.loss=sigmoid"),
        (("experiment=dpo", "resources.reference.num_workers=0"), "offline.job=dpo compares with the initial policy"),
        (("experiment=sft", *ROWS), "algorithm.supervised.coef=1 adds rows to steps of RL, and offline.job=sft"),
        (("experiment=glyphs_nft", *ROWS), "sampler.kind=flow makes images: set algorithm.supervised.coef=0"),
        (("experiment=dpo", "offline.dpo.beta=0"), "offline.dpo.beta got 0"),
        (("experiment=dpo", "offline.dpo.label_smoothing=0.5"), "less than 0.5"),
    ],
)
def test_what_contradicts_a_job_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([*words, *GIVEN])


# The section `guard`: which signs are on, and contradictions with the rest of a run.

DIGITS = ("experiment=digits", "resources=laptop")


def test_without_a_judge_and_limits_nothing_is_on() -> None:
    assert guard_signs(load_config([*DIGITS])) == []


def test_a_limit_switches_its_sign_on_and_none_an_action_off() -> None:
    config = load_config([*DIGITS, "guard.limits.length=2", "guard.limits.language=0.1", "guard.actions.language=none"])
    assert guard_signs(config) == ["length"]
    assert config.guard.action_of("length") == "warn"
