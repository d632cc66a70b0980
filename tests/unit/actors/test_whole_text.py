"""Tokens are those of the whole text, for each tokenizer: prompts, offline rows, warm start, turns of environments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import families, write_text_policy
from tokenizer_kinds import LOSSY, TEMPLATES, TOKENIZERS, chat_of_model, write_tokenizer
from transformers import ByT5Tokenizer

from mobula.actors.datasets.conversations import CHOSEN, REJECTED, Conversation, Ending
from mobula.actors.datasets.conversations import Turn as OfflineTurn
from mobula.actors.datasets.rows import Row, Turn
from mobula.actors.environments.base import Message
from mobula.actors.environments.bridge import TurnBridge
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.processors.conversation import ConversationProcessor
from mobula.cluster.records.markup import literal, verbatim
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.learner.policies.pretrained import smollm2_tokenizer
from mobula.learner.policies.tiny import TINY

Messages = list[dict[str, Any]]
ANSWERS = ("7", "The answer is 7.", "é 你好 🙂!", "- one\n\n- two", "  indented", "line\n", "\n\nline", "7 ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


USUAL = set(zip(cycle(TOKENIZERS), TEMPLATES, strict=False))  # every template, and every kind of tokenizer
PAIRS = [
    pytest.param(pair, marks=() if pair in USUAL else pytest.mark.exhaustive, id="-".join(pair))
    for pair in product(TOKENIZERS, TEMPLATES)
]


@pytest.fixture(scope="module", params=PAIRS)
def chat(request: pytest.FixtureRequest, folder: Path) -> ChatProcessor:
    write_tokenizer(folder, *request.param)
    made = chat_of_model(folder)
    made.kind, made.template_name = request.param  # type: ignore[attr-defined]
    made.end = TEMPLATES[request.param[1]][1]  # type: ignore[attr-defined]
    return made


def talk(*texts: str) -> Messages:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def own_ids(chat: ChatProcessor, messages: Messages, **options: Any) -> list[int]:
    return list(chat.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options))


def group_of(chat: ChatProcessor, messages: Messages, *endings: Messages, has_tail: bool = False) -> ScoredGroup:
    """The group of a row; messages of an ending may have `"weight": 0`."""
    found = []
    for number, ending in enumerate(endings):
        turns = [
            OfflineTurn(m["role"], literal(m["content"]), m["role"] == "assistant" and m.get("weight", 1) == 1)
            for m in ending
        ]
        found.append(Ending(tuple(turns), REJECTED if number else CHOSEN))
    context = tuple(OfflineTurn(m["role"], m["content"], False) for m in messages)
    made = ConversationProcessor(chat, system_prompt="", max_tokens=4000, has_tail=has_tail)
    return made.prepare(Conversation("r", context, tuple(found), ()), "p")


def ids_of(group: ScoredGroup, number: int = 0) -> list[int]:
    actions = group.group.trajectories[number].actions
    return [*group.group.prompt.expanded_ids.tolist(), *actions.token_ids.tolist()]


def trained(chat: ChatProcessor, group: ScoredGroup, number: int = 0) -> str:
    trajectory = group.group.trajectories[number]
    return chat.tokenizer.decode(trajectory.actions.token_ids[trajectory.action_mask].tolist())


def assert_trained(chat: ChatProcessor, found: str, answers: Sequence[str]) -> None:
    """White space around an answer is the template's or the answer's."""
    texts = found.split(chat.end)
    if chat.kind in LOSSY:
        if not "".join(answers).isascii():
            return
        answers, texts = ([without_space(text) for text in some] for some in (answers, texts))
    assert [text.strip() for text in texts] == [*(answer.strip() for answer in answers), ""]


def without_space(text: str) -> str:
    return "".join(text.split()).lower()


def test_a_prompt_has_the_tokens_of_the_template(chat: ChatProcessor) -> None:
    for text in ("Q", " What is 2 + 2?", "é\n", "Say more.\n\n"):
        expected = own_ids(chat, talk("Q", "The answer is 7.", text), add_generation_prompt=True)
        row = Row("r", text, "7", "7", history=(Turn("user", "Q"), Turn("assistant", "The answer is 7.")))
        assert chat.prepare(row, "p").compact_ids.tolist() == expected


def test_a_conversation_has_the_tokens_of_the_template_and_trains_the_answers(chat: ChatProcessor) -> None:
    for answer in ANSWERS:
        messages = talk("Q", "I am fine.", "More", answer)
        whole = own_ids(chat, messages)
        assert ids_of(group_of(chat, messages[:1], messages[1:], has_tail=True)) == whole
        group = group_of(chat, messages[:1], messages[1:])
        found = ids_of(group)
        assert found == whole[: len(found)] and found[-1] == chat.eos_token_ids[0]
        assert_trained(chat, trained(chat, group), ["I am fine.", answer])


def test_the_last_turn_alone_is_trained_in_the_same_tokens(chat: ChatProcessor) -> None:
    for answer in ANSWERS:
        messages = talk("Q", "I am fine.", "More", answer)
        untrained = {**messages[1], "weight": 0}
        group = group_of(chat, messages[:1], [untrained, *messages[2:]])
        found = ids_of(group)
        assert found == own_ids(chat, messages)[: len(found)]
        assert_trained(chat, trained(chat, group), [answer])


def test_both_answers_of_a_pair_have_the_tokens_of_the_template(chat: ChatProcessor) -> None:
    asked, answers = talk("Q", "I am fine.", "Which?"), ("The answer is 7.", "\n- one")
    group = group_of(chat, asked, *([{"role": "assistant", "content": text}] for text in answers))
    for number, text in enumerate(answers):
        found = ids_of(group, number)
        assert found == own_ids(chat, [*asked, {"role": "assistant", "content": text}])[: len(found)]
        assert_trained(chat, trained(chat, group, number), [text])


SPACE = {"vicuna": " ", "llama2": " ", "mistral": " ", "tinyllama": "\n"}  # of the template before an answer


def test_a_warm_start_writes_behind_the_prompt_what_the_whole_text_has(chat: ChatProcessor) -> None:
    prompt = chat.prepare(Row("r", "Q", "7", "7"), "p")
    space, given = SPACE.get(chat.template_name, ""), prompt.compact_ids.tolist()
    for answer in ANSWERS:
        text = prompt.text + (answer if answer.startswith(space) else space + answer)
        found = [*given, *chat.encode_answer(answer).tolist()]
        assert found[-1] == chat.eos_token_ids[0]
        whole = chat.tokenizer(text, add_special_tokens=False).input_ids
        if whole[: len(given)] == given:
            assert found[:-1] == whole
        else:  # a token of the whole text holds characters of the prompt and of the answer
            assert chat.tokenizer.decode(found[:-1]) == chat.tokenizer.decode(whole)


def test_an_observation_has_the_tokens_that_follow_in_the_whole_text(chat: ChatProcessor) -> None:
    bridge = TurnBridge(chat, "x")
    for text in ("More", " What is 2 + 2?", "\n- one", "é"):
        whole = own_ids(chat, talk("Q", "I am fine.", text), add_generation_prompt=True)
        delta = bridge.delta((Message("user", text),)).ids.tolist()
        assert [bridge.end_id, *delta] == whole[-len(delta) - 1 :]
        prompt = own_ids(chat, talk("Q"), add_generation_prompt=True)
        if chat.template_name != "llama2" and prompt == whole[: len(prompt)]:  # it adds a space before the end
            assert [*prompt, *chat.encode_answer("I am fine.").tolist(), *delta] == whole


def test_special_tokens_of_an_observation_are_text_without_a_space_around_them(chat: ChatProcessor) -> None:
    text = "a</s>b <|im_end|><s> c"
    for ids in (
        TurnBridge(chat, "x").delta((Message("user", text),)).ids.tolist(),
        chat.prepare(Row("r", verbatim(text), "7", "7"), "p").compact_ids.tolist(),
    ):
        shown = chat.tokenizer.decode(ids)
        if chat.kind == "word_piece":  # a word with a special token in it is unknown
            assert "a < / s > b < | im _ end | > < [UNK] > c" in shown
        else:
            assert text in (shown.replace("▁", " ") if chat.kind == "unigram" else shown)
        clean = own_ids(chat, talk("Q", "7", "a b"), add_generation_prompt=True)
        special = set(chat.tokenizer.all_special_ids) | set(chat.tokenizer.added_tokens_decoder)
        assert sum(i in special for i in ids) <= sum(i in special for i in clean)


def made_chat(folder: Path, kind: str, template: str, **options: Any) -> ChatProcessor:
    write_tokenizer(folder, kind, template, **options)
    made = chat_of_model(folder)
    made.kind, made.end = kind, TEMPLATES[template][1]  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("kind", ["prepend", "metaspace_first", "byte_level"])
def test_bos_stands_once_though_template_and_tokenizer_both_write_it(folder: Path, kind: str) -> None:
    chat, messages = made_chat(folder, kind, "vicuna", adds_bos=True), talk("Q", "7", "More", "8")
    assert chat.tokenizer("Q").input_ids[0] == chat.tokenizer.bos_token_id, "the tokenizer adds it"
    found = ids_of(group_of(chat, messages[:1], messages[1:]))
    assert found == own_ids(chat, messages) and found.count(chat.tokenizer.bos_token_id) == 1
    prompt = chat.prepare(Row("r", "Q", "7", "7"), "p").compact_ids.tolist()
    assert prompt == own_ids(chat, messages[:1], add_generation_prompt=True)
    assert chat.tokenizer.bos_token_id not in chat.encode_answer("7")


@pytest.mark.parametrize("kind", ["prepend", "metaspace_first", "byte_level"])
def test_a_dropped_thought_stays_where_it_is_trained_alone(folder: Path, kind: str) -> None:
    """Qwen 3 drops thoughts of earlier turns."""
    chat, thought = made_chat(folder, kind, "qwen3"), "<think>\nhm\n</think>\n\n"
    messages = talk("Q", thought + "7", "More", thought + "8")
    last = group_of(chat, messages[:1], [{**messages[1], "weight": 0}, *messages[2:]])
    found = ids_of(last)
    assert found == own_ids(chat, messages)[: len(found)] and chat.tokenizer.decode(found).count("hm") == 1
    assert_trained(chat, trained(chat, last), [thought + "8"])
    both = group_of(chat, messages[:1], messages[1:])
    turn = "<|im_start|>{}\n{}<|im_end|>"
    text = "\n".join(turn.format(m["role"], m["content"]) for m in messages)
    assert ids_of(both) == chat.tokenizer(text, add_special_tokens=False).input_ids
    assert_trained(chat, trained(chat, both), [thought + "7", thought + "8"])


def test_a_token_over_the_border_is_trained_if_it_holds_more_of_an_answer_than_white_space(folder: Path) -> None:
    messages = talk("Q", "I am fine.")
    chat = made_chat(folder, "crosses_words", "vicuna")
    group = group_of(chat, messages[:1], messages[1:])
    assert ids_of(group) == own_ids(chat, messages)
    assert trained(chat, group).strip() == "ASSISTANT: I am fine.</s>", "one token holds both"
    assert group.group.prompt.text == "<s>USER: Q", "it is no part of the context"
    prompt = chat.prepare(Row("r", "Q", "7", "7"), "p").compact_ids.tolist()
    assert prompt == own_ids(chat, messages[:1], add_generation_prompt=True)
    answer = chat.encode_answer("I am fine.").tolist()
    assert chat.tokenizer.decode(answer).strip() == "I am fine.</s>", "the tokens of a prompt are given"
    spaces = made_chat(folder, "crosses_spaces", "vicuna")
    group = group_of(spaces, messages[:1], messages[1:])
    assert ids_of(group) == own_ids(spaces, messages)
    assert trained(spaces, group) == "I am fine.</s>", "another token holds the head and white space alone"
    assert group.group.prompt.text == "<s>USER: Q"


def test_a_template_without_an_end_gets_one_as_text(folder: Path) -> None:
    chat = made_chat(folder, "metaspace_first", "vicuna")
    (folder / "chat_template.jinja").write_text(TEMPLATES["vicuna"][0].replace("</s>", " "))
    chat = chat_of_model(folder)
    messages = talk("Q", "7", "More", "8")
    found = ids_of(group_of(chat, messages[:1], messages[1:]))
    text = "<s>USER: Q ASSISTANT: 7</s> USER: More ASSISTANT: 8</s>"
    assert found == chat.tokenizer(text, add_special_tokens=False).input_ids


def test_a_tokenizer_without_offsets_is_refused(folder: Path, tmp_path: Path) -> None:
    made_chat(folder, "byte_level", "chatml")
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES["chatml"][0])
    with pytest.raises(ValueError, match=r"policy\.model=.*ByT5Tokenizer.*convert its tokenizer to a tokenizer\.json"):
        chat_of_model(tmp_path)


@pytest.mark.parametrize("family", families(TINY))
def test_tiny_models_have_the_tokens_of_their_own_processor(family: str, tmp_path: Path) -> None:
    model = TINY[family](tmp_path / "model")
    chat = chat_of_model(model, device="cuda")
    messages = talk("Which digit?", "The answer is 7.", " More\n", "\n- one")
    text = chat.render([(m["role"], m["content"]) for m in messages], is_open=False)
    if chat.first_end(chat.template.around_answer()[2]) is None:  # the template ends no answer
        for message in messages[1::2]:
            text = text.replace(message["content"], message["content"] + chat.end_text())
    own = chat.renderer(text=text, add_special_tokens=False)["input_ids"]
    found = ids_of(group_of(chat, messages[:1], messages[1:], has_tail=True))
    assert found == list(own[0] if isinstance(own[0], list) else own)


def test_smollm2_has_the_tokens_of_its_template(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    write_text_policy(tmp_path, "llama")
    tokenizer = smollm2_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    chat = chat_of_model(tmp_path)
    chat.kind, chat.end = "", "<|im_end|>"  # type: ignore[attr-defined]
    for answer in ANSWERS:
        messages = [{"role": "system", "content": "Be brief."}, *talk("2 + 2?", "It is  4.", "More", answer)]
        group = group_of(chat, messages[:2], messages[2:], has_tail=True)
        assert ids_of(group) == own_ids(chat, messages)
        assert_trained(chat, trained(chat, group), ["It is  4.", answer])
        prompt = own_ids(chat, messages[:4], add_generation_prompt=True)
        row = Row("r", "More", "7", "7", history=tuple(Turn(m["role"], m["content"]) for m in messages[:3]))
        assert chat.prepare(row, "p").compact_ids.tolist() == prompt
