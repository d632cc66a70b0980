"""Checks of the weights of a checkpoint."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.processors.conversation import ConversationProcessor
from mobula.actors.processors.image_tokens import ImageTokenProcessor
from mobula.cluster.errors import PreflightError
from mobula.cluster.weight_sync.manifest import Manifest, StoredTensor, checkpoint_files, stored_tensors
from mobula.configs.schema import RunConfig
from mobula.deploy.preflight.findings import PreflightFinding, Severity
from mobula.learner.policies.checkpoint.stored import StoredModel, broken_ties

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
    processor: (
        ChatProcessor | ConversationProcessor | FlowProcessor | ImagePairProcessor | ImageTokenProcessor
    )  # by the job and the kind of model
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
        if isinstance(self.processor, ImageTokenProcessor):
            return self.processor.template_source
        return self.chat.template.source if self.chat else ""


NUM_SHOWN = 3
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
        yield from _find_pickled(key, folder)
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
    """Returns the quantisation method of a checkpoint; empty if it is not quantised."""
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


def _find_pickled(key: str, folder: Path) -> Iterator[PreflightFinding]:
    files = sorted(file.name for pattern in PICKLED for file in folder.glob(pattern))
    if files:
        yield PreflightFinding(
            key,
            f"{key}={folder} has its weights as pickles ({files[0]}), and safetensors alone are read",
            "load it with transformers and save it again (save_pretrained)",
        )


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
    more = len(names) - NUM_SHOWN
    return ", ".join(names[:NUM_SHOWN]) + (f" and {more} more" if more > 0 else "")
