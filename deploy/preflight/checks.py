"""Checks of a checkpoint before a run starts: template, tokens, weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from mobula.actors.datasets.rows import IMAGE_PLACEHOLDER
from mobula.actors.environments.bridge import TurnBridge
from mobula.actors.processors.chat import ChatProcessor
from mobula.cluster.errors import PromptError
from mobula.configs.schema import RunConfig
from mobula.deploy.preflight.findings import PreflightFinding, Severity
from mobula.deploy.preflight.weights import LoadedModel, check_weights
from mobula.learner.policies.attention.packed import missing_package
from mobula.learner.policies.families import family_at, model_type_at

MODEL, SYSTEM_PROMPT, TEMPLATE_KWARGS = "policy.model", "data.system_prompt", "data.template_kwargs"
QUESTION, ANSWER, NEXT_QUESTION = "probe-a41", "probe-b52", "probe-c63"
ANOTHER = "use another chat template, or another checkpoint"


def check_template_kwargs(config: RunConfig, loaded: LoadedModel) -> Iterator[PreflightFinding]:
    """Checks that the template reads every variable."""
    for name in config.data.template_kwargs:
        if not re.search(rf"\b{re.escape(name)}\b", loaded.template_source):
            yield PreflightFinding(
                TEMPLATE_KWARGS,
                f"{TEMPLATE_KWARGS}.{name} is not read by the chat template of {MODEL}={config.policy.model}",
                "correct the name, or remove it",
            )


def check_question(config: RunConfig, chat: ChatProcessor) -> Iterator[PreflightFinding]:
    problem = _problem(chat, [("user", QUESTION)])
    if problem:
        yield PreflightFinding(MODEL, _of_template(config, f"cannot write a question: it {problem}"), ANOTHER)


def check_system_prompt(config: RunConfig, chat: ChatProcessor) -> Iterator[PreflightFinding]:
    if not config.data.system_prompt:
        return
    problem = _problem(chat, [("system", QUESTION), ("user", NEXT_QUESTION)])
    if problem:
        yield PreflightFinding(
            SYSTEM_PROMPT,
            f"{SYSTEM_PROMPT}={config.data.system_prompt[:40]!r} cannot be used: {_of_template(config, problem)}",
            f"set {SYSTEM_PROMPT}='' and put the text into the rows or data.prompt_suffix, or {ANOTHER}",
        )


def check_answers(config: RunConfig, chat: ChatProcessor) -> Iterator[PreflightFinding]:
    """Checks that offline jobs can locate answers in rendered conversations, and that a stop token ends an answer."""
    problem = _problem(chat, [("user", QUESTION), ("assistant", ANSWER)], is_open=False)
    if problem:
        severity = Severity.REFUSE if config.offline.is_on else Severity.WARN
        yield PreflightFinding(MODEL, _of_template(config, f"cannot write an answer: it {problem}"), ANOTHER, severity)
        return
    _, _, tail = chat.template.around_answer()
    if tail.strip() and chat.first_end(tail) is None:
        yield PreflightFinding(
            MODEL,
            _of_template(config, f"writes {tail[:40]!r} behind an answer, and none of the tokens that end a response"),
            "add the id of its end to eos_token_id in generation_config.json of the checkpoint",
            Severity.WARN,
        )


def check_turns(config: RunConfig, chat: ChatProcessor) -> Iterator[PreflightFinding]:
    """Checks that observations can follow answers of the policy."""
    if not config.environment.is_on:
        return
    try:
        TurnBridge(chat, config.policy.model)
    except ValueError as error:
        problem, _, action = str(error).rpartition("; ")
        yield PreflightFinding(MODEL, problem, action)


def check_images(config: RunConfig, chat: ChatProcessor) -> Iterator[PreflightFinding]:
    if not chat.takes_images or config.sampler.max_images_per_prompt == 0:
        return
    try:
        text = chat.render([("user", f"{IMAGE_PLACEHOLDER}{QUESTION}")], is_open=True)
        num_placed = int((chat.tokenize(text) == chat.images.placeholder_id).sum())
    except PromptError:
        num_placed = 0
    if num_placed != 1:
        yield PreflightFinding(
            MODEL,
            _of_template(config, f"writes {num_placed} placeholders for one image"),
            "rows with images will be skipped; use a template that takes parts for those",
            Severity.WARN,
        )


def _problem(chat: ChatProcessor, turns: Sequence[tuple[str, str]], *, is_open: bool = True) -> str:
    """Returns the reason why the template cannot render these turns; empty if it can."""
    try:
        text = chat.render(turns, is_open=is_open)
    except PromptError as error:
        return f"refuses the turns {', '.join(role for role, _ in turns)} ({error.__cause__})"
    lost = [role for role, content in turns if content not in text]
    if lost:
        return f"drops the text of the {lost[0]} turn"
    return "writes the list of parts as text" if re.search(r"""['"]type['"]\s*:""", text) else ""


def _of_template(config: RunConfig, problem: str) -> str:
    return f"the chat template of {MODEL}={config.policy.model} {problem}"


NUM_SHOWN = 4


def check_vocabulary(config: RunConfig, chat: ChatProcessor) -> Iterator[PreflightFinding]:
    """Checks that every token has an embedding. More embeddings than tokens are padding."""
    size, beyond = chat.num_embeddings, chat.tokens_beyond_embeddings()
    if beyond:
        num_tokens = max(beyond.values()) + 1
        shown = ", ".join(list(beyond)[:NUM_SHOWN]) + (", ..." if len(beyond) > NUM_SHOWN else "")
        yield PreflightFinding(
            MODEL,
            f"{MODEL}={config.policy.model} has a tokenizer of {num_tokens} tokens and embeddings of {size}, none for "
            f"{shown}",
            f"resize the embeddings (model.resize_token_embeddings({num_tokens})) and save the checkpoint again, or "
            "save it with the tokenizer that it was trained with",
        )


def check_special_ids(config: RunConfig, chat: ChatProcessor) -> Iterator[PreflightFinding]:
    """Checks that stop, padding and media placeholder ids have embeddings."""
    size = chat.num_embeddings
    for name, ids in chat.special_ids().items():
        beyond = [i for i in ids if not 0 <= i < size]
        if beyond:
            yield PreflightFinding(
                MODEL,
                f"{MODEL}={config.policy.model} names {beyond[0]} as {name} and has embeddings of {size}",
                f"correct {name} in its generation_config.json, config.json or tokenizer files",
            )


def check_attention(config: RunConfig, loaded: LoadedModel) -> Iterator[PreflightFinding]:
    """Checks that the kernels of `policy.attention` are installed."""
    attention = config.policy.attention
    if package := missing_package(attention):
        yield PreflightFinding(
            "policy.attention",
            f"policy.attention={attention} needs the package {package}, which is not installed",
            "install it, or set policy.attention=sdpa, which computes packed rows with torch's own kernel",
        )


def check_packing(config: RunConfig, loaded: LoadedModel) -> Iterator[PreflightFinding]:
    """Checks that the model separates packed rows, and that ranks can share the tokens of rows."""
    values = {
        "learner.packing": (config.learner.packing is True, False),  # `auto` computes padded rows
        "learner.sequence_parallel": (config.learner.sequence_parallel, 1),
    }
    if not loaded.chat or family_at(str(loaded.folder)).keeps_packed_rows_apart:
        return
    for key, (value, off) in values.items():
        if value != off:
            yield PreflightFinding(
                key,
                f"{key}={str(value).lower()}, and layers of a {model_type_at(str(loaded.folder))} (policy.model="
                f"{config.policy.model}) carry a state from token to token",
                f"set {key}={str(off).lower()}",
            )


Check = Callable[[RunConfig, LoadedModel], Iterable[PreflightFinding]]
CHECKS: tuple[Check, ...] = (check_attention, check_packing, check_weights, check_template_kwargs)
CHAT_CHECKS: tuple[Callable[[RunConfig, ChatProcessor], Iterable[PreflightFinding]], ...] = (
    check_vocabulary,
    check_special_ids,
    check_question,
    check_system_prompt,
    check_answers,
    check_turns,
    check_images,
)
"""In the order in which findings are shown. Each takes a second at most: it reads files and encodes short texts."""


def find_mismatches(config: RunConfig, loaded: LoadedModel) -> Iterator[PreflightFinding]:
    """Runs every check; `CHAT_CHECKS` for a model of text."""
    for check in CHECKS:
        yield from check(config, loaded)
    if loaded.chat is not None:
        for chat_check in CHAT_CHECKS:
            yield from chat_check(config, loaded.chat)
