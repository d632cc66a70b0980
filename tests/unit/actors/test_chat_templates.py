"""Prompts, answers and pairs with the structures of released chat templates; the right texts are written out."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_checkpoints import write_text_policy
from tokenizer_kinds import (
    CHAT_TEMPLATES,
    DEEPSEEK_R1,
    GEMMA_3,
    QWEN2_5,
    QWEN3,
    TEXT_ALONE,
    THINKING,
    TOOLS,
    chat_of_model,
)
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from mobula.actors.datasets.conversations import CHOSEN, REJECTED, Conversation, Ending
from mobula.actors.datasets.conversations import Turn as OfflineTurn
from mobula.actors.datasets.rows import Row, Turn
from mobula.actors.environments.base import Message
from mobula.actors.environments.bridge import TurnBridge
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.processors.conversation import ConversationProcessor
from mobula.actors.samplers.huggingface import StopStrings
from mobula.cluster.errors import PromptError
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.partial_response import SampledSequence
from mobula.cluster.records.trajectory import TrajectoryGroup, WeightSpan
from mobula.learner.policies.tiny import write_tiny, write_tiny_qwen2_5_vl

Build = Callable[..., ChatProcessor]
THOUGHT = "<think>\nhm\n</think>\n\n7"

# Template -> the text before the answer to "Q" as a policy is asked, and as a plain answer is trained.
CHATML = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = {
    "qwen2.5": (f"<|im_start|>system\nBe helpful.<|im_end|>\n{CHATML}", ""),
    "qwen3": (CHATML, "<think>\n\n</think>\n\n"),
    "qwen3.5": (f"{CHATML}<think>\n", "\n</think>\n\n"),
    "smolvlm": ("<|im_start|>User: Q<|im_end|>\nAssistant:", ""),
    "llama3.1": (
        "<|im_start|>system\n\nToday is 26 Jul 2024\n\n<|im_end|><|im_start|>user\n\nQ<|im_end|>"
        "<|im_start|>assistant\n\n",
        "",
    ),
    "gemma3": ("<|im_start|>user\nQ<|im_end|>\n<|im_start|>model\n", ""),
    "deepseek-r1": ("<|im_start|>User|Q<|im_start|>Assistant|<think>\n", None),
    "generation": (CHATML, ""),
    "without an end": ("USER: Q ASSISTANT:", ""),
    "mistral": ("<|endoftext|>[INST] Q[/INST]", ""),
    "glm4": ("<|endoftext|><|im_end|>user\nQ<|im_start|>assistant\n", "<think></think>\n"),
    "text alone": (CHATML, ""),
    "parts alone": (CHATML, ""),
}
# A template's rendering of "7" as the answer, up to its end, where it begins otherwise than the generation prompt.
PLAIN = {"deepseek-r1": "<|im_start|>User|Q<|im_start|>Assistant|"}
# A template's own spelling of a thought.
THOUGHTS = {"glm4": "<think>hm</think>\n7"}
LEADING_SPACE = ("smolvlm", "mistral", "without an end")  # the policy writes it: one token with the first word


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_policy(tmp_path_factory.mktemp("text"), "qwen3")


@pytest.fixture
def build(folder: Path) -> Build:
    def built(template: str, **kwargs: Any) -> ChatProcessor:
        (folder / "chat_template.jinja").write_text(template)
        if "date_string" in template:
            kwargs = {"date_string": "26 Jul 2024", **kwargs}
        return chat_of_model(folder, template_kwargs=kwargs)

    return built


def offline(chat: ChatProcessor, **options: Any) -> ConversationProcessor:
    return ConversationProcessor(chat, **{"system_prompt": "", "max_tokens": 500, "has_tail": False, **options})


def conversation(*answers: str, turns: int = 1) -> Conversation:
    """A row with one ending an answer; with two turns each answer is given twice."""
    endings = []
    for number, text in enumerate(answers):
        answer = OfflineTurn("assistant", text, True)
        later = (OfflineTurn("user", "More", False), answer) if turns == 2 else ()
        endings.append(Ending((answer, *later), REJECTED if number else CHOSEN))
    return Conversation("r", (OfflineTurn("user", "Q", False),), tuple(endings), ())


def texts(chat: ChatProcessor, group: TrajectoryGroup) -> list[tuple[str, str]]:
    """The whole text of each trajectory, and the trained part of it."""
    decode, found = chat.tokenizer.decode, []
    for trajectory in group.trajectories:
        ids, mask = trajectory.actions.token_ids, trajectory.action_mask
        found.append((group.prompt.text + decode(ids.tolist()), decode(ids[mask].tolist())))
    return found


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_a_question_becomes_the_prompt_of_the_template(build: Build, name: str) -> None:
    assert build(CHAT_TEMPLATES[name]).prepare(Row("r", "Q", "7", "7"), "p").text == PROMPTS[name][0]


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_an_answer_is_trained_and_what_the_template_writes_around_it_is_not(build: Build, name: str) -> None:
    chat = build(CHAT_TEMPLATES[name])
    prompt, written = PROMPTS[name]
    before = PLAIN.get(name, prompt + str(written))
    answer = " 7<|im_end|>" if name in LEADING_SPACE else "7<|im_end|>"
    group = offline(chat).prepare(conversation("7", "8"), "p").group
    assert texts(chat, group) == [
        (before + answer, answer),
        (before + answer.replace("7", "8"), answer.replace("7", "8")),
    ]
    assert group.prompt.text == before, "the endings of a pair share it"


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_both_answers_of_two_turns_are_trained(build: Build, name: str) -> None:
    chat = build(CHAT_TEMPLATES[name])
    [(whole, trained)] = texts(chat, offline(chat).prepare(conversation("7", turns=2), "p").group)
    answer = " 7<|im_end|>" if name in LEADING_SPACE else "7<|im_end|>"
    assert trained == answer * 2
    assert whole.count("Q") == whole.count("More") == 1
    assert "<|im_end|><|im_end|>" not in whole


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_a_thought_in_an_answer_is_trained_as_the_policy_writes_it(build: Build, name: str) -> None:
    chat = build(CHAT_TEMPLATES[name])
    prompt = PROMPTS[name][0]
    thought = THOUGHTS.get(name, THOUGHT)
    written = thought.removeprefix("<think>\n") if prompt.endswith("<think>\n") else thought
    answer = f"{' ' * (name in LEADING_SPACE)}{written}<|im_end|>"
    [(whole, trained)] = texts(chat, offline(chat).prepare(conversation(THOUGHT), "p").group)
    assert (whole, trained) == (prompt + answer, answer)
    [(_, both)] = texts(chat, offline(chat).prepare(conversation(THOUGHT, turns=2), "p").group)
    assert both == answer * 2, "also the one that the template drops from earlier turns"


@pytest.mark.parametrize("written", ["<think>hm</think>7", "<think>\nhm\n</think>\n7"])
def test_white_space_of_a_thought_is_the_templates(build: Build, written: str) -> None:
    for template, expected in ((QWEN3, THOUGHT), (THINKING, THOUGHT.removeprefix("<think>\n"))):
        chat = build(template)
        [(_, trained)] = texts(chat, offline(chat).prepare(conversation(written), "p").group)
        assert trained == f"{expected}<|im_end|>"


def test_the_templates_text_is_trained_on_request(build: Build) -> None:
    chat = build(QWEN3)
    group = offline(chat, trains_template=True).prepare(conversation("7"), "p").group
    assert texts(chat, group) == [
        (group.prompt.text + trained, trained) for trained in ["<think>\n\n</think>\n\n7<|im_end|>"]
    ]
    assert group.prompt.text == PROMPTS["qwen3"][0]


def test_a_row_renders_no_conversation_twice(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    chat, rendered = build(QWEN3), []
    render = chat.template.render

    def recorded(messages: Any, *, is_open: bool, **more: Any) -> str:
        rendered.append((repr(messages), is_open))
        return render(messages, is_open=is_open, **more)

    monkeypatch.setattr(chat.template, "render", recorded)
    offline(chat).prepare(conversation("7", "8"), "p")

    assert len(rendered) == len(set(rendered)) == 5, "the question open and closed, a mark and two answers behind it"


def test_a_reward_model_reads_to_the_end_of_what_the_template_writes(build: Build) -> None:
    chat = build(QWEN3)
    [(whole, _)] = texts(chat, offline(chat, has_tail=True).prepare(conversation("7"), "p").group)
    assert whole == chat.render([("user", "Q"), ("assistant", "7")], is_open=False)


def test_template_kwargs_reach_prompts_and_answers(build: Build) -> None:
    chat = build(QWEN3, enable_thinking=False)
    closed = PROMPTS["qwen3"][0] + "<think>\n\n</think>\n\n"
    assert chat.prepare(Row("r", "Q", "7", "7"), "p").text == closed
    assert texts(chat, offline(chat).prepare(conversation("7"), "p").group) == [(closed + "7<|im_end|>", "7<|im_end|>")]


def test_a_row_that_the_template_refuses_is_named_with_its_words(build: Build) -> None:
    chat = build(GEMMA_3)
    row = Row("r", "Q", "7", "7", history=(Turn("user", "one"), Turn("user", "two")))
    with pytest.raises(PromptError, match="refuses turns of user, user, user .*Roles must alternate") as caught:
        chat.check(row)
    assert caught.value.reason == "bad_prompt"


def test_a_template_without_answers_is_refused_by_row(build: Build) -> None:
    chat = build(TEXT_ALONE.replace("m.content ~", "(m.content if m.role == 'user' else '') ~"))
    with pytest.raises(PromptError, match="drops answers of the assistant"):
        offline(chat).check(conversation("7"))


def test_a_system_prompt_that_goes_when_an_answer_follows_is_refused_by_row(build: Build) -> None:
    chat = build(CHAT_TEMPLATES["mistral"])
    asked = Row("r", "Q", "7", "7", history=(Turn("system", "S"),))
    assert chat.prepare(asked, "p").text == "<|endoftext|>[INST] S\n\nQ[/INST]"
    row = replace(conversation("7"), context=(OfflineTurn("system", "S", False), OfflineTurn("user", "Q", False)))
    with pytest.raises(PromptError, match="changes earlier turns when later ones follow"):
        offline(chat).check(row)


def test_the_end_that_the_template_writes_comes_first(build: Build, folder: Path) -> None:
    assert build(DEEPSEEK_R1).encode_answer("7")[-1] == build(DEEPSEEK_R1).tokenizer.convert_tokens_to_ids("<|im_end|>")
    settings = json.loads((folder / "generation_config.json").read_text())
    other = settings | {"eos_token_id": [settings["eos_token_id"], settings["pad_token_id"]]}
    (folder / "generation_config.json").write_text(json.dumps(other))
    chat = build(TEXT_ALONE.replace("<|im_end|>", "<|endoftext|>"))
    assert chat.eos_token_ids == (settings["pad_token_id"], settings["eos_token_id"])
    assert chat.encode_answer("7")[-1] == settings["pad_token_id"]
    (folder / "generation_config.json").write_text(json.dumps(settings))


def tagged(folder: Path, target: Path) -> str:
    """A copy of the checkpoint whose tags are special tokens."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.add_tokens(["<answer>", "</answer>"], special_tokens=True)
    tokenizer.save_pretrained(target)
    (target / "chat_template.jinja").write_text(QWEN3)
    return str(target)


def test_tags_that_are_special_tokens_are_text_to_rewards_stop_strings_and_rows(folder: Path, tmp_path: Path) -> None:
    model = tagged(folder, tmp_path)
    chat = chat_of_model(model)
    ids = chat.tokenizer("<answer>7</answer>8<|im_end|><|endoftext|>", add_special_tokens=False).input_ids
    assert chat.decode(ids) == "<answer>7</answer>8"
    hidden = (*chat.eos_token_ids, chat.pad_token_id)
    sampled = SampledSequence(TokenActions(np.array(ids)), np.zeros(len(ids)), (WeightSpan(0, 0, len(ids)),), None)
    assert StopStrings(model, ["</answer>"], hidden).cut(sampled).actions.token_ids.tolist() == ids[:3]
    chat.check(Row("r", "Answer between <answer> and </answer>.", "7", "<answer>7</answer>"))
    for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        with pytest.raises(PromptError, match="special token"):
            chat.check(Row("r", f"What is {token}?", "7", "7"))


def test_a_template_of_the_tokenizer_is_that_of_the_processor(tmp_path: Path) -> None:
    model = write_tiny_qwen2_5_vl(tmp_path)

    def prompt() -> str:
        return chat_of_model(model).render([("user", "<image>Q")], is_open=True)

    expected, template = prompt(), (model / "chat_template.jinja").read_text()
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"policy\.model=.* has no chat template: .*chat_template\.jinja"):
        prompt()
    forms = (template, [{"name": "default", "template": template}, {"name": "tool_use", "template": "x"}])
    for form in forms:
        (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": form}))
        assert prompt() == expected
    named = [{"name": "tool_use", "template": "x"}, {"name": "rag", "template": "x"}]
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": named}))
    with pytest.raises(ValueError, match="chat templates tool_use, rag and no default one"):
        prompt()
    (model / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert prompt() == expected


def test_images_without_a_place_in_the_template_skip_their_row(tmp_path: Path) -> None:
    model = write_tiny_qwen2_5_vl(tmp_path)
    (model / "chat_template.jinja").write_text(TEXT_ALONE)
    chat = chat_of_model(model)
    assert chat.render([("user", "Q")], is_open=True) == PROMPTS["text alone"][0]
    with pytest.raises(PromptError, match="takes the content of a user turn as text alone, so it has no place for the"):
        chat.render([("user", "<image>Q")], is_open=True)


@pytest.mark.parametrize(
    ("name", "head", "answer"),
    [
        ("qwen3.5", "<|im_start|>user\n{image}Q<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", "7"),
        ("smolvlm", "<|im_start|>User:{image}Q<|im_end|>\nAssistant:", " 7"),
        ("gemma3", "<|im_start|>user\n{image}Q<|im_end|>\n<|im_start|>model\n", "7"),
    ],
)
def test_answers_about_images_are_found(tmp_path: Path, name: str, head: str, answer: str) -> None:
    model = write_tiny_qwen2_5_vl(tmp_path)
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATES[name])
    Image.new("RGB", (56, 56)).save(tmp_path / "a.png")
    chat = chat_of_model(model, "data.max_pixels=50176")
    row = replace(conversation("7"), images=(tmp_path / "a.png",), context=(OfflineTurn("user", "<image>Q", False),))
    group = offline(chat).prepare(row, "p").group
    before, trained = head.format(image="<|vision_start|><|image_pad|><|vision_end|>"), f"{answer}<|im_end|>"
    assert texts(chat, group) == [(before + trained, trained)]
    assert len(group.prompt.media_spans) == len(group.prompt.media) == 1


@pytest.mark.parametrize(("pad", "is_end"), [("!", True), (None, True), ("<|endoftext|>", False)])
def test_padding_that_is_a_word_of_texts_stays_in_them(folder: Path, tmp_path: Path, pad: str, is_end: bool) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.pad_token = pad
    tokenizer.save_pretrained(tmp_path)
    chat = chat_of_model(tmp_path)
    assert (chat.pad_token_id in chat.eos_token_ids) == is_end
    assert chat.check(Row("r", "Say it!", "7!", "7!")) > 0
    assert chat.decode(chat.encode_answer("7!")) == "7!"


@pytest.mark.parametrize("bos_in_template", [False, True])
def test_a_prompt_begins_with_one_bos_where_the_processor_adds_it(tmp_path: Path, bos_in_template: bool) -> None:
    model = write_tiny("llava", tmp_path)  # as LLaVA 1.5, whose template has no BOS
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.bos_token = "<|endoftext|>"
    added = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = added
    tokenizer.save_pretrained(model)
    template = CHAT_TEMPLATES["without an end"]
    (model / "chat_template.jinja").write_text("{{- bos_token -}}" * bos_in_template + template)
    chat = chat_of_model(model, device="cuda")
    prompt = chat.prepare(Row("r", "Q", "7", "7"), "p")
    assert prompt.text == "<|endoftext|>USER: Q ASSISTANT:"
    messages = [{"role": "user", "content": "Q"}]
    own = chat.renderer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert prompt.expanded_ids.tolist() == own["input_ids"][0]
    [(whole, trained)] = texts(chat, offline(chat).prepare(conversation("7", turns=2), "p").group)
    assert whole.startswith(prompt.text) and whole.count("<|endoftext|>") == 1
    assert trained == " 7<|im_end|>" * 2


@pytest.mark.parametrize("name", [name for name in CHAT_TEMPLATES if name != "without an end"])
def test_an_observation_is_written_behind_an_answer_of_the_policy(build: Build, name: str) -> None:
    chat = build(CHAT_TEMPLATES[name])
    bridge = TurnBridge(chat, "x")
    end, opened = bridge.end_id, PROMPTS[name][0].rpartition("Q")[2]
    assert chat.tokenizer.decode([end]) == "<|im_end|>"
    delta = chat.tokenizer.decode(bridge.delta((Message("user", "More"),)).ids.tolist())
    assert delta.endswith(f"More{opened}")
    assert "<think>" not in delta.removesuffix(opened)


CALLED = OfflineTurn("assistant", "", True, {"tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]})
REASONED = OfflineTurn("assistant", "7", True, {"reasoning_content": "because"})
TOOLS_OF_A_ROW = '{"tools": [{"function": {"name": "f"}}]}'


def test_tool_calls_and_thoughts_are_trained_as_the_template_writes_them(build: Build) -> None:
    chat = build(TOOLS)
    row = replace(conversation("8"), endings=(Ending((CALLED, Turn("tool", "2"), REASONED), CHOSEN),))
    [(whole, trained)] = texts(chat, offline(chat).prepare(replace(row, template=TOOLS_OF_A_ROW), "p").group)
    assert whole.startswith('<|im_start|>system\n[{"function": {"name": "f"}}]<|im_end|>')
    call = '<tool_call>f{"a": 1}</tool_call><|im_end|>'
    assert trained == f"{call}<think>\nbecause\n</think>\n\n7<|im_end|>"
    assert f"<|im_start|>assistant\n{call}\n<|im_start|>tool\n2<|im_end|>" in whole


def test_the_prompt_of_rl_has_the_tools_and_calls_of_its_row(build: Build) -> None:
    chat = build(TOOLS)
    history = (Turn("user", "Q"), CALLED, Turn("tool", "2"))
    text = chat.prepare(Row("r", "And?", "7", "7", history=history, template=TOOLS_OF_A_ROW), "p").text
    assert text.startswith('<|im_start|>system\n[{"function": {"name": "f"}}]')
    assert '<|im_start|>assistant\n<tool_call>f{"a": 1}</tool_call><|im_end|>' in text


@pytest.mark.parametrize(
    ("template", "change", "name"),
    [
        (QWEN2_5, {"template": TOOLS_OF_A_ROW}, "tools"),
        (QWEN2_5, {"template": '{"chat_template_kwargs": {"foo": 1}}'}, "foo"),
        (QWEN2_5, {"history": (Turn("user", "Q"), CALLED, Turn("tool", "2"))}, "tool_calls"),
        (QWEN2_5, {"history": (Turn("user", "Q"), REASONED)}, "reasoning_content"),
        (TOOLS, {"history": (Turn("user", "Q"), REASONED)}, "reasoning_content"),  # of an earlier turn: left out
    ],
)
def test_a_field_that_the_template_leaves_out_refuses_the_row(
    build: Build, template: str, change: dict[str, Any], name: str
) -> None:
    with pytest.raises(PromptError, match=f"does not show `{name}`.*data.ignored_fields=.{name}"):
        build(template).prepare(replace(Row("r", "And?", "7", "7"), **change), "p")


def test_variables_of_a_row_come_before_those_of_the_configuration(build: Build) -> None:
    chat = build(QWEN3, enable_thinking=True)
    row = Row("r", "Q", "7", "7", template='{"chat_template_kwargs": {"enable_thinking": false}}')
    assert chat.prepare(row, "p").text.endswith("<think>\n\n</think>\n\n")
    assert not chat.prepare(replace(row, template=""), "p").text.endswith("</think>\n\n")
