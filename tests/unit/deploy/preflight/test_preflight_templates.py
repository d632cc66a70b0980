"""Checks of chat templates and tokens: each finding names its key, and a checkpoint that fits has none."""

import json
import shutil
from pathlib import Path

import pytest
from chat_templates import CHAT_TEMPLATES, QWEN3, TEXT_ALONE
from tiny_text_models import write_text_policy
from transformers import AutoTokenizer

from mobula.cluster.records.media import MediaStore
from mobula.configs.load import load_config
from mobula.deploy.preflight.checks import find_mismatches
from mobula.deploy.wiring.preparation import load_checked
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

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
    return [(one.key, f"{one.severity}: {one}") for one in find_mismatches(config, loaded)]


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
def test_a_system_prompt_that_the_template_does_not_take_is_refused(
    text_model: Path, template: str, problem: str
) -> None:
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
