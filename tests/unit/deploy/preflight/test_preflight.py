"""The preflight: findings on templates, weights, rows and user code; how rows are packed, and why they are not."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import write_text_policy
from tokenizer_kinds import CHAT_TEMPLATES, QWEN3, TEXT_ALONE
from transformers import AutoTokenizer

from mobula.actors.processors.worker import make_processor
from mobula.cluster.errors import PreflightError
from mobula.cluster.records.media import MediaReader, MediaStore
from mobula.cluster.replay.journal import journal_identity
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.doctor.this_machine import Verdict, check_checkpoint, check_start
from mobula.deploy.planning.clusters import described_nodes
from mobula.deploy.planning.memory import TRAINING
from mobula.deploy.planning.plan_command import plan_memory
from mobula.deploy.preflight import checks
from mobula.deploy.preflight.decisions import with_absolute_paths, with_decisions, with_row_layout
from mobula.deploy.preflight.findings import PreflightFinding, Severity
from mobula.deploy.wiring.preparation import checkpoint_folder, load_checked
from mobula.learner.policies.checkpoint import stored_model
from mobula.learner.policies.shapes import shape_of
from mobula.learner.policies.tiny import write_tiny, write_tiny_qwen2_5_vl

REFUSED = PreflightFinding("policy.model", "policy.model has no weights", "download it again")
WARNED = PreflightFinding("data.path", "data.path is slow", "copy it", Severity.WARN)


def test_findings_that_refuse_end_the_start_with_all_of_their_messages(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(PreflightError) as caught:
        checks.refuse([WARNED, REFUSED, REFUSED])
    assert str(caught.value) == "; and ".join(["policy.model has no weights: download it again"] * 2)
    assert caplog.messages == ["data.path is slow: copy it"]


def test_warnings_let_a_run_start() -> None:
    checks.refuse([WARNED])


def test_the_doctor_checks_a_checkpoint_that_is_here(tmp_path: Path) -> None:
    def verdicts() -> list[Verdict]:
        config = load_config(["experiment=own", f"policy.model={tmp_path / 'model'}", f"data.path={tmp_path}"])
        return [finding.verdict for finding in check_checkpoint(config)]

    assert verdicts() == [Verdict.OK], "it is not here yet"
    write_tiny_qwen2_5_vl(tmp_path / "model")
    assert verdicts() == [Verdict.OK]
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    assert verdicts() == [Verdict.MISSING]


def test_the_doctor_checks_rows_that_are_here(tmp_path: Path) -> None:
    words = ["experiment=own", f"policy.model={tmp_path / 'model'}", f"data.path={tmp_path}"]
    assert [finding.verdict for finding in check_start(load_config(words))] == [Verdict.MISSING], "no model, no file"
    write_tiny("qwen3", tmp_path / "model")
    assert [finding.verdict for finding in check_start(load_config(words))] == [Verdict.MISSING], "no file"
    worked = {"question": "Half of 48?", "answer": "It is 24.\nThat is all.", "level": 3}
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.jsonl").write_text(f"{json.dumps(worked)}\n" * 3)
    rows, *references, fields = check_start(load_config(words))
    assert (rows.verdict, rows.detail.partition(",")[0]) == (Verdict.OK, "train: 3 usable")
    assert references[0].verdict is Verdict.WARNING and references[0].detail.startswith("3 of 3 references of train")
    assert "level (" in fields.detail
    (tmp_path / "train.jsonl").write_text(json.dumps({**worked, "kto_tag": False}))
    [refused] = check_start(load_config(words))
    assert refused.verdict is Verdict.MISSING and "`kto_tag` False" in refused.action


@pytest.mark.parametrize(
    ("name", "packing", "found"),
    [("qwen3.5", "true", 1), ("qwen3.5", "false", 0), ("qwen3.5", "auto", 0), ("qwen3", "true", 0)],
)
def test_a_model_with_a_state_takes_no_packed_rows(tmp_path: Path, name: str, packing: str, found: int) -> None:
    folder = write_tiny(name, tmp_path / "model", seed=0)
    words = ["experiment=own", f"policy.model={folder}", "data.path=none", f"learner.packing={packing}"]
    config = load_config(words)
    loaded = checks.LoadedModel(folder, None, make_processor(config, MediaReader(timeout_s=1, max_items=1)), None)
    findings = [str(finding) for finding in checks.check_packing(config, loaded)]
    assert len(findings) == found
    assert all("qwen3_5" in text and "set learner.packing=false" in text for text in findings)
    shared = config.learner.model_copy(update={"packing": False, "sequence_parallel": 2})
    findings = [str(found) for found in checks.check_packing(config.model_copy(update={"learner": shared}), loaded)]
    assert [("set learner.sequence_parallel=1" in text) for text in findings] == [True] * (name == "qwen3.5")


# Checks of chat templates and tokens: each finding names its key, and a checkpoint that fits has none.

REFUSES_SYSTEM = "{%- if messages[0].role == 'system' -%}{{- raise_exception('No system here') -}}{%- endif -%}" + QWEN3
DROPS_SYSTEM = "{%- set messages = messages | rejectattr('role', 'equalto', 'system') | list -%}" + QWEN3


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_policy(tmp_path_factory.mktemp("text"), "qwen3")


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("vision"))


def found(folder: Path, template: str | None = None, *words: str, experiment: str = "own") -> list[tuple[str, str]]:
    """(key, severity: message) of each finding."""
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    words = (f"experiment={experiment}", f"policy.model={folder}", "data.path=x", "policy.tiny=none", *words)
    config = load_config(words)
    loaded = load_checked(config, MediaStore(lambda one: one, 1 << 20))
    return [(one.key, f"{one.severity}: {one}") for one in checks.find_mismatches(config, loaded)]


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
@pytest.mark.parametrize("experiment", ["own", "sft"])
def test_templates_of_released_structure_have_no_finding(text_model: Path, name: str, experiment: str) -> None:
    assert found(text_model, CHAT_TEMPLATES[name], experiment=experiment) == []


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (REFUSES_SYSTEM, "refuses the turns system, user (No system here)"),
        (DROPS_SYSTEM, "drops the text of the system turn"),
    ],
)
def test_a_system_prompt_that_no_template_takes_is_refused(text_model: Path, template: str, problem: str) -> None:
    assert found(text_model, template) == []
    [(key, message)] = found(text_model, template, "data.system_prompt=Be brief.")
    assert key == "data.system_prompt"
    assert message.startswith("refuse: data.system_prompt='Be brief.' cannot be used: the chat template")
    assert problem in message


def test_the_template_reads_every_variable(text_model: Path) -> None:
    assert found(text_model, QWEN3, "data.template_kwargs={enable_thinking: false}") == []
    [(key, message)] = found(text_model, QWEN3, "data.template_kwargs={enable_thinkin: false}")
    assert key == "data.template_kwargs"
    assert "data.template_kwargs.enable_thinkin is not read by the chat template" in message


def test_a_template_that_loses_a_question_or_an_answer_is_refused(text_model: Path) -> None:
    lost = TEXT_ALONE.replace("m.content ~", "(m.content if m.role == 'assistant' else '') ~")
    assert [key for key, message in found(text_model, lost) if message.startswith("refuse")] == ["policy.model"]
    lost = TEXT_ALONE.replace("m.content ~", "(m.content if m.role == 'user' else '') ~")
    assert [message.split(":")[0] for _, message in found(text_model, lost)] == ["warn"]
    assert [message.split(":")[0] for _, message in found(text_model, lost, experiment="sft")] == ["refuse"]


def test_an_answer_without_a_known_end_is_a_warning(text_model: Path) -> None:
    [(key, message)] = found(text_model, TEXT_ALONE.replace("<|im_end|>", "<|done|>"))
    assert (key, message.split(":")[0]) == ("policy.model", "warn")
    assert "eos_token_id" in message


def test_a_template_without_a_place_for_images_is_a_warning(vision_model: Path, tmp_path: Path) -> None:
    assert found(vision_model) == []
    shutil.copytree(vision_model, tmp_path, dirs_exist_ok=True)
    [(key, message)] = found(tmp_path, TEXT_ALONE)
    assert (key, message.split(":")[0]) == ("policy.model", "warn")
    assert "writes 0 placeholders for one image" in message


def test_tokens_without_embeddings_are_refused(text_model: Path, tmp_path: Path) -> None:
    shutil.copytree(text_model, tmp_path, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    num_tokens = len(tokenizer)
    tokenizer.add_tokens(["<a>", "</a>"])
    tokenizer.save_pretrained(tmp_path)
    [(key, message)] = found(tmp_path, QWEN3)
    assert key == "policy.model"
    assert f"has a tokenizer of {num_tokens + 2} tokens and embeddings of {num_tokens}, none for <a>, </a>" in message
    assert f"model.resize_token_embeddings({num_tokens + 2})" in message


def test_an_end_without_an_embedding_is_refused(text_model: Path, tmp_path: Path) -> None:
    shutil.copytree(text_model, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 99999]}))
    [(key, message)] = found(tmp_path, QWEN3)
    assert key == "policy.model"
    assert "names 99999 as eos_token_id" in message


def test_a_damaged_generation_config_is_refused(text_model: Path, tmp_path: Path) -> None:
    shutil.copytree(text_model, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3,')
    with pytest.raises(ValueError, match=r"policy\.model=.* has a generation_config\.json that cannot be read"):
        found(tmp_path, QWEN3)
    (tmp_path / "generation_config.json").unlink()
    assert found(tmp_path, QWEN3) == []


# Checkpoints that cannot be trained, or that do not fit their config.json, are refused by name before the start.

CONFIG, WEIGHTS = "config.json", "model.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny("llama", tmp_path / "model", tie_word_embeddings=True)


def set_config(folder: Path, **values: object) -> None:
    settings = json.loads((folder / CONFIG).read_text()) | values
    (folder / CONFIG).write_text(json.dumps(settings))


def set_weights(folder: Path, **tensors: torch.Tensor) -> None:
    state = {name: t.clone() for name, t in (load_file(folder / WEIGHTS) | tensors).items()}
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})


def findings(folder: Path) -> list[PreflightFinding]:
    config = load_config(["experiment=own", f"policy.model={folder}", "data.path=data"])
    return list(checks.check_weights(config, checks.LoadedModel(folder, None, None, stored_model(folder))))


def write_gguf(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-q4_1.gguf")


UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    **{
        method: (
            lambda folder, method=method: set_config(folder, quantization_config={"quant_method": method, "bits": 4}),
            rf"is quantised \(quantization_config in config.json: {method}\).*: name the checkpoint that it was made",
        )
        for method in ("gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors", "mxfp4")
    },
    "of a part": (
        lambda folder: set_config(folder, text_config={"quantization_config": {"quant_method": "awq"}}),
        "is quantised .*awq",
    ),
    "no method": (lambda folder: set_config(folder, quantization_config={}), r"is quantised .*or remove that entry"),
    "switched off": (
        lambda folder: set_config(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": False}),
        r"is quantised .*bitsandbytes.*or remove that entry",
    ),
    "pickles": (
        lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model-00001-of-00002.bin"),
        r"policy\.model=.* has its weights as pickles \(pytorch_model-00001-of-00002\.bin\).*save_pretrained",
    ),
    "an index of other files": (
        lambda folder: (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors"),
        r"policy\.model: .* holds no safetensors file of weights .*: download or write",
    ),
    "ModelOpt": (lambda folder: (folder / "hf_quant_config.json").write_text("{}"), "hf_quant_config.json"),
    "MLX": (lambda folder: set_config(folder, quantization={"bits": 4, "group_size": 64}), "quantization in config"),
    "no word in config.json": (
        lambda folder: set_weights(folder, **{"up_proj.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}),
        r"up_proj\.weight \(and 0 more\) is stored as F8_E4M3",
    ),
    "GGUF": (write_gguf, r"GGUF file \(model-q4_1\.gguf\).*: name the safetensors checkpoint"),
    "an adapter beside the weights": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        r"has an adapter \(adapter_config.json\).*: merge it",
    ),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_checkpoints_that_cannot_be_trained_are_refused(model: Path, kind: str) -> None:
    assert checkpoint_folder("policy.model", str(model)) == model
    change, message = UNUSABLE[kind]
    change(model)
    with pytest.raises(PreflightError, match=message):
        checkpoint_folder("policy.model", str(model))


def test_a_gguf_file_and_an_adapter_alone_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert "is a GGUF file" in next(iter(checks.find_unusable("policy.model", file))).problem
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(PreflightError, match="is an adapter without its model: merge it"):
        checkpoint_folder("policy.model", str(adapter))


def test_indices_are_no_quantised_weights(model: Path) -> None:
    set_weights(model, **{"position_ids": torch.arange(4)[None], "attn.bias": torch.ones(2, 2).bool()})
    assert not list(checks.find_unusable("policy.model", model))


def test_what_files_lack_or_have_in_another_shape_is_refused_by_name(model: Path) -> None:
    assert not findings(model)
    state = load_file(model / WEIGHTS)
    del state["model.norm.weight"]
    save_file(state | {"model.layers.0.input_layernorm.weight": torch.ones(3)}, model / WEIGHTS, {"format": "pt"})
    lacking, misshapen = findings(model)
    assert "lacks model.norm.weight, which would start from random values" in lacking.problem
    assert "model.layers.0.input_layernorm.weight is [3], [128] by config.json" in misshapen.problem
    assert {lacking.severity, misshapen.severity} == {Severity.REFUSE}


def test_spare_tensors_are_named_and_trained_without(model: Path) -> None:
    set_weights(model, **{"value_head.weight": torch.ones(1, 128)})
    [found] = findings(model)
    assert found.severity is Severity.WARN
    assert "value_head.weight" in found.problem


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.safetensors", "model-00001-of-00002.safetensors"])
def test_of_two_sets_of_weights_the_run_says_which_is_used(model: Path, name: str) -> None:
    (model / name).write_bytes((model / WEIGHTS).read_bytes())
    (model / "training_args.bin").write_bytes(b"")
    [found] = findings(model)
    assert found.severity is Severity.WARN
    assert found.problem.endswith(f"more than one set of weights: {WEIGHTS} is used, {name} is not")


def test_a_tie_that_does_not_hold_is_refused(model: Path) -> None:
    embeddings = load_file(model / WEIGHTS)["model.embed_tokens.weight"]
    set_weights(model, **{"lm_head.weight": embeddings})
    assert not findings(model)
    set_weights(model, **{"lm_head.weight": embeddings + 1})
    [found] = findings(model)
    assert "its lm_head.weight differs from model.embed_tokens.weight" in found.problem
    assert "set tie_word_embeddings to false" in found.action


GAP_WARNED = "supervision.on_logprob_gap=warn"
IMAGE_TOKENS = [
    "experiment=digits", "sampler=image_tokens", "warm_start=none", "evaluation.num_samples=1", "algorithm.kl.coef=0",
    "resources.reference.num_workers=0",
]  # fmt: skip
FLASH = ("policy.attention=flash_attention_2", "resources=gpu_1")
TAUGHT = (
    "algorithm.distillation.coef=1", "algorithm.distillation.teacher={models}/qwen3.5", "algorithm.kl.coef=0"
)  # fmt: skip
BOTH, NOTHING_SHARED, PADDED = (True, True), (True, False), (False, True)
"""`learner.packing` and `learner.share_prompts` of a run."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("qwen3", "qwen3.5", "gemma3", "llava"):
        write_tiny(name, folder / name, seed=0)
    return folder


def run_of(models: Path, name: str, *words: str) -> RunConfig:
    own = [word.format(models=models) for word in words]
    return load_config(["experiment=digits", f"policy.model={models / name}", "policy.tiny=none", *own])


@pytest.mark.parametrize(
    ("name", "words", "expected", "line"),
    [
        ("qwen3", (), BOTH, ""),
        ("qwen3", ("learner.share_prompts=false",), NOTHING_SHARED, ""),
        ("qwen3", ("learner.packing=false",), PADDED, ""),
        ("qwen3", ("policy.attention=eager",), PADDED, "packing is off: policy.attention=eager does not keep"),
        ("qwen3", FLASH, NOTHING_SHARED, "share_prompts is off: policy.attention=fl"),
        ("qwen3", ("policy.dropout=true", GAP_WARNED), NOTHING_SHARED, "share_prompts is off: policy.dropout=true is"),
        ("qwen3.5", (), PADDED, r"packing is off: a qwen3_5 \(policy.model=.*\): its layers carry a state"),
        ("gemma3", (), PADDED, r"packing is off: a gemma3 \(.*\): its images need a mask; learner.packing=true packs"),
        ("gemma3", ("learner.packing=true",), BOTH, ""),
        ("llava", (), PADDED, r"packing is off: a llava \(.*\): it has no family file"),
        ("llava", ("learner.packing=true",), NOTHING_SHARED, r"share_prompts is off: a llava .* that says it can"),
        ("qwen3", TAUGHT, PADDED, r"packing is off: a qwen3_5 \(algorithm.distillation.teacher="),
    ],
)
def test_rows_are_packed_where_everything_allows_it(
    models: Path, name: str, words: tuple[str, ...], expected: tuple, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    found = with_row_layout(run_of(models, name, *words)).learner
    assert (found.packing, found.share_prompts) == expected
    assert found.shares_prompts is (expected == BOTH)
    assert len(caplog.messages) == bool(line) and all(re.search(f"learner.{line}", found) for found in caplog.messages)


@pytest.mark.parametrize(("words", "num_lines"), [(["experiment=glyphs_grpo"], 0), (IMAGE_TOKENS, 1)])
def test_samplers_of_images_have_padded_rows(
    models: Path, words: list[str], num_lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = with_row_layout(load_config([*words, f"policy.model={models / 'qwen3'}"]))
    assert config.learner.packing is False
    assert len(caplog.messages) == num_lines


def test_memory_is_planned_for_the_rows_of_the_run(models: Path) -> None:
    """A run with padded rows keeps the activations of every copy of a prompt."""
    words = ("data.max_prompt_tokens=480", "sampler.max_model_len=512", "learner.tokens_per_microbatch=100000")
    nodes = described_nodes("1x1x80GB")

    def activations(name: str, *more: str) -> int:
        run = run_of(models, name, "resources=gpu_1", *words, *more)
        plan = plan_memory(run, shape_of(str(models / name)), nodes)
        return plan.by_role["learner"].device[TRAINING]["activations"]

    assert activations("gemma3") == activations("gemma3", "learner.packing=false")
    assert activations("qwen3") < 0.5 * activations("qwen3", "learner.packing=false")


def test_a_configuration_is_decided_once_and_stays_so(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    words = ["data=jsonl", "data.path=data", "data.cache_path=cache", "folder=runs", "rewards=math_answer"]
    config = run_of(models, "gemma3", *words)
    monkeypatch.chdir(tmp_path)
    found = with_decisions(config)
    assert found.learner.packing is False and config.learner.packing == "auto"
    assert found.data.prompt_suffix == config.question_suffix != config.data.prompt_suffix == "auto"
    paths = (found.data.path, found.data.cache_path, found.folder)
    assert paths == tuple(tmp_path / name for name in ("data", "cache", "runs"))
    num_lines = len(caplog.messages)
    monkeypatch.chdir("/")
    assert with_decisions(found) == found and len(caplog.messages) == num_lines
    assert journal_identity(found) != journal_identity(config), "undecided, it is of another learner"


def test_paths_are_those_of_the_folder_here_and_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def reward(request):\n    return 0.0\n")
    (tmp_path / "rows").mkdir()
    component = "{name: mine, function: mine.py:reward, weight: 1.0, options: {}, service: reward}"
    words = [
        "experiment=own", "policy.model=org/name", "data.path=rows", f"rewards.components=[{component}]",
        "rewards.accuracy_component=mine", "algorithm.supervised.path=rows", "algorithm.supervised.coef=0.1",
    ]  # fmt: skip
    found = with_absolute_paths(load_config(words))
    assert (found.policy.model, found.data.path) == ("org/name", tmp_path / "rows")
    assert found.rewards.components[0].function == f"{tmp_path}/mine.py:reward"
    assert found.algorithm.supervised.path == str(tmp_path / "rows")
    assert with_absolute_paths(load_config(["experiment=digits"])).policy.model.startswith(f"{tmp_path}/")
    for words in (["experiment=calculator"], ["experiment=own", "policy.model=m", "data=huggingface", "data.path=a/b"]):
        config = load_config(words)
        assert with_absolute_paths(config).data.path == config.data.path, "it is no folder"
