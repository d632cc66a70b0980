"""Checks of a checkpoint before a run starts: template, tokens, weights."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mobula.actors.datasets.rows import IMAGE_PLACEHOLDER
from mobula.actors.environments.bridge import TurnBridge
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.processors.conversation import ConversationProcessor
from mobula.actors.processors.image_tokens import DrawingProcessor
from mobula.cluster.errors import PreflightError, PromptError
from mobula.cluster.weight_sync.manifest import Manifest, StoredTensor, checkpoint_files, stored_tensors
from mobula.configs.schema import RunConfig
from mobula.deploy.preflight.findings import PreflightFinding, Severity
from mobula.learner.policies.attention.packed import missing_package
from mobula.learner.policies.checkpoint import StoredModel, broken_ties
from mobula.learner.policies.families import family_at, model_type_at

if TYPE_CHECKING:
    from mobula.actors.processors.flow import FlowProcessor, ImagePairProcessor

_logger = logging.getLogger(__name__)


def refuse(findings: Iterable[PreflightFinding]) -> None:
    """Logs the warnings and notes among `findings`."""
    refused = []
    for finding in findings:
        if finding.severity is Severity.REFUSE:
            refused.append(str(finding))
        else:
            _logger.log(logging.WARNING if finding.severity is Severity.WARN else logging.INFO, "%s", finding)
    if refused:
        raise PreflightError("; and ".join(refused))


@dataclass(frozen=True)
class LoadedModel:
    """The parts of `policy.model` that are loaded before a run; checks read these and load nothing twice."""

    folder: Path  # with the files of the trained network
    checkpoint: Manifest
    # By the job and the kind of model.
    processor: ChatProcessor | ConversationProcessor | FlowProcessor | ImagePairProcessor | DrawingProcessor
    stored: StoredModel | None  # the tensors in its files; None of a flow model

    @property
    def chat(self) -> ChatProcessor | None:
        """The processor of text, and of media in it; None for a model that draws images."""
        if isinstance(self.processor, ConversationProcessor):
            return self.processor.chat
        return self.processor if isinstance(self.processor, ChatProcessor) else None

    @property
    def template_source(self) -> str:
        """The chat template; empty where none is rendered."""
        if isinstance(self.processor, DrawingProcessor):
            return self.processor.template_source
        return self.chat.template.source if self.chat else ""


NUM_SHOWN_NAMES = 3
FLOATING = ("F64", "F32", "F16", "BF16")
QUANTISED_KEYS = ("quantization_config", "compression_config", "quantization")  # the last one is that of MLX
QUANTISED_FILE = "hf_quant_config.json"  # of ModelOpt
UNQUANTISED = (
    "name the checkpoint that it was made from, in bfloat16 or float32, or remove that entry if its weights are such"
)
PICKLED = ("*.bin", "*.pt", "*.pth")  # of torch.save
WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "consolidated*.pt*", "model*.pt*", "*.gguf", "*.h5", "*.msgpack")


def find_unusable(key: str, folder: Path) -> Iterator[PreflightFinding]:
    """Yields the reasons why the checkpoint in `folder`, the value of `key`, cannot be used. Reads headers only."""
    if not (folder / "config.json").is_file():
        yield from _find_other_formats(key, folder)
        return
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if method := _quantisation(settings, folder):
        yield PreflightFinding(key, f"{key}={folder} is quantised ({method}): it cannot be trained here", UNQUANTISED)
    elif not any(folder.glob("*.safetensors")):
        yield from _find_other_formats(key, folder)
        files = sorted(file.name for pattern in PICKLED for file in folder.glob(pattern))
        if files:
            yield PreflightFinding(
                key,
                f"{key}={folder} has its weights as pickles ({files[0]}), and safetensors alone are read",
                "load it with transformers and save it again (save_pretrained)",
            )
    else:
        yield from _find_quantised_tensors(key, folder)
    if (folder / "adapter_config.json").is_file():
        yield PreflightFinding(
            key,
            f"{key}={folder} has an adapter (adapter_config.json) beside its weights, which transformers adds to them "
            "and engines do not",
            "merge it into the weights (merge_and_unload of PEFT), or move adapter_config.json away if they are merged "
            "already",
        )


def check_weights(config: RunConfig, loaded: LoadedModel) -> Iterator[PreflightFinding]:
    """Checks that the files have exactly the tensors that config.json describes."""
    stored, key = loaded.stored, "policy.model"
    if stored is None:
        return
    model = f"{key}={config.policy.model}"
    has_new_head = config.offline.job == "reward_model"  # the output embeddings of a language model go
    if missing := [name for name in stored.missing if not (has_new_head and name.endswith("lm_head.weight"))]:
        yield PreflightFinding(
            key,
            f"{model} lacks {_shown(missing)}, which would start from random values",
            "download it again, or save the whole model, its output embeddings included",
        )
    if stored.misshapen:
        yield PreflightFinding(
            key,
            f"{model} has tensors of other shapes than its config.json gives: {_shown(stored.misshapen)}",
            "use the config.json that was saved with these weights",
        )
    for copy, source in broken_ties(loaded.folder, stored):
        yield PreflightFinding(
            key,
            f"{model} ties its embeddings (tie_word_embeddings in config.json), and its {copy} differs from {source}: "
            "transformers would train two tensors, engines have one",
            f"set tie_word_embeddings to false in its config.json, or remove {copy} from its files",
        )
    used = [file.name for file in checkpoint_files(loaded.folder)]
    others = sorted(f.name for kind in WEIGHTS for f in loaded.folder.glob(kind) if f.name not in used)
    if others:
        yield PreflightFinding(
            key,
            f"{model} has more than one set of weights: {_shown(used)} is used, {_shown(others)} is not",
            "move the set to use into a folder with its config.json and tokenizer, if it is the other one",
            Severity.WARN,
        )
    if stored.left_out:
        yield PreflightFinding(
            key,
            f"{model} has tensors that its model does not have: {_shown(stored.left_out)}",
            "they are neither trained nor written to policy/; if they belong to the model, correct its config.json",
            Severity.WARN,
        )


def _quantisation(settings: dict[str, Any], folder: Path) -> str:
    parts = [settings, *(part for part in settings.values() if isinstance(part, dict))]
    for part in parts:
        for name in QUANTISED_KEYS:
            if isinstance(entry := part.get(name), dict):
                return f"{name} in config.json: {entry.get('quant_method') or entry.get('quant_algo') or entry}"
    return QUANTISED_FILE if (folder / QUANTISED_FILE).is_file() else ""


def _find_quantised_tensors(key: str, folder: Path) -> Iterator[PreflightFinding]:
    try:
        tensors = stored_tensors(folder)
    except PreflightError as error:
        problem, _, action = str(error).rpartition(": ")
        yield PreflightFinding(key, f"{key}: {problem}", action)
        return
    packed = sorted(name for name, tensor in tensors.items() if _is_packed(name, tensor))
    if packed:
        yield PreflightFinding(
            key,
            f"{key}={folder} is quantised: its {packed[0]} (and {len(packed) - 1} more) is stored as "
            f"{tensors[packed[0]].dtype}, which cannot be trained here",
            "name the checkpoint that it was made from, in bfloat16 or float32",
        )


def _is_packed(name: str, tensor: StoredTensor) -> bool:
    """Whether a weight does not consist of floating-point numbers that can be trained; buffers are no weights."""
    return tensor.dtype not in FLOATING and "weight" in name.rpartition(".")[2]


def _find_other_formats(key: str, folder: Path) -> Iterator[PreflightFinding]:
    files = [folder] if folder.suffix == ".gguf" else sorted(folder.glob("*.gguf")) if folder.is_dir() else []
    if files:
        yield PreflightFinding(
            key,
            f"{key}={folder} is a GGUF file ({files[0].name}), which cannot be trained here",
            "name the safetensors checkpoint that it was made from, or load it with transformers (gguf_file=...) and "
            "save the model",
        )
    elif folder.is_dir() and (folder / "adapter_config.json").is_file():
        yield PreflightFinding(
            key,
            f"{key}={folder} is an adapter without its model",
            "merge it into its base model (merge_and_unload of PEFT) and name the result",
        )


def _shown(names: Sequence[str]) -> str:
    more = len(names) - NUM_SHOWN_NAMES
    return ", ".join(names[:NUM_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


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


NUM_SHOWN_TOKENS = 4


def check_vocabulary(config: RunConfig, chat: ChatProcessor) -> Iterator[PreflightFinding]:
    """Checks that every token has an embedding. More embeddings than tokens are padding."""
    size, beyond = chat.num_embeddings, chat.tokens_beyond_embeddings()
    if beyond:
        num_tokens = max(beyond.values()) + 1
        shown = ", ".join(list(beyond)[:NUM_SHOWN_TOKENS]) + (", ..." if len(beyond) > NUM_SHOWN_TOKENS else "")
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
