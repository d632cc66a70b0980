"""The decoder, the flow head and the prompt of NextStep-1.

A prompt is a caption, `<|image_area|>ROWS*COLUMNS` and the token that begins an image. ROWS x COLUMNS continuous tokens
follow, row by row. The decoder's last state before a token is the condition of the flow head, which denoises the token;
`image_in_projector(token)` is the next input of the decoder. Modules have the names of the released weights.

Source: NextStep-1, arXiv:2508.10711.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import transformers as hf
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn.functional import layer_norm
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

AREA = "<|image_area|>"
EPSILON = 1e-6  # of layer norms
FREQUENCIES, MAX_PERIOD = 256, 10_000.0  # of the embedding of times
PARTS = {
    "language": ("embed_tokens.", "layers.", "norm.", "lm_head."),
    "head": ("image_head.", "image_in_projector.", "image_out_projector."),
}
"""Parts that can be frozen: name -> prefixes of the parameters' names."""


@strict
class NextStepConfig(hf.Qwen2Config):
    """config.json of the released checkpoints. The decoder has biases on q, k and v alone."""

    model_type = "nextstep"

    vae_name_or_path: str | None = "vae/"
    latent_size: int = 32
    latent_patch_size: int = 2
    latent_channels: int = 16
    boi: int | None = None
    eoi: int | None = None
    image_placeholder_id: int | None = None
    pad_token_id_added: int | None = None
    lm_loss_weight: float = 0.01
    im_loss_weight: float = 1.0
    fm_head_dim: int = 1536
    fm_head_layers: int = 12
    fm_head_batch_mul: int = 4
    use_gen_pos_embed: bool = False
    base_image_grid_size: int = 32
    head_dim: int | None = None
    attention_bias: bool = True
    o_attention_bias: bool | None = False
    mlp_bias: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        if not self.attention_bias or self.o_attention_bias or self.mlp_bias:
            raise ValueError(
                f"config.json has attention_bias={self.attention_bias}, o_attention_bias={self.o_attention_bias} and "
                f"mlp_bias={self.mlp_bias}: a nextstep decoder has biases on q, k and v alone here (true, false, false)"
            )
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]  # of transformers

    @property
    def token_size(self) -> int:
        """D: numbers of one token."""
        return self.latent_channels * self.latent_patch_size**2


class HeadBlock(nn.Module):
    """A residual block with adaptive layer norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=EPSILON)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate = self.adaLN_modulation(condition).chunk(3, dim=-1)
        return x + gate * self.mlp(self.in_ln(x) * (1 + scale) + shift)


class HeadOutput(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(condition).chunk(2, dim=-1)
        return self.linear(layer_norm(x, x.shape[-1:], eps=EPSILON) * (1 + scale) + shift)


class TimeEmbedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, times: Tensor) -> Tensor:
        half = FREQUENCIES // 2
        rates = torch.exp(-math.log(MAX_PERIOD) * torch.arange(half, device=times.device) / half)
        angles = times.float()[:, None] * rates
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1).to(next(self.mlp.parameters()).dtype))


class FlowHead(nn.Module):
    """Predicts the velocity (token minus noise) of noised tokens."""

    def __init__(self, token_size: int, condition_size: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.time_embed = TimeEmbedding(width)
        self.cond_embed = nn.Linear(condition_size, width)
        self.input_proj = nn.Linear(token_size, width)
        self.res_blocks = nn.ModuleList(HeadBlock(width) for _ in range(num_layers))
        self.final_layer = HeadOutput(width, token_size)

    def forward(self, noised: Tensor, times: Tensor, conditions: Tensor) -> Tensor:
        """[N, D]: of tokens [N, D] at times [N] (0: noise, 1: token), given conditions [N, C]."""
        x, both = self.input_proj(noised), self.time_embed(times) + self.cond_embed(conditions)
        for block in self.res_blocks:
            x = block(x, both)
        return self.final_layer(x, both)


class NextStep(Qwen2Model):
    """The decoder with the projectors and the flow head of image tokens."""

    config: NextStepConfig
    config_class = NextStepConfig
    _keys_to_ignore_on_load_unexpected = ["gen_pos_embed"]  # computed by `grid_positions`
    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}

    def __init__(self, config: NextStepConfig) -> None:
        super().__init__(config)
        width, size = config.hidden_size, config.token_size
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.image_in_projector = nn.Linear(size, width)
        self.image_out_projector = nn.Linear(width, width)
        head = FlowHead(size, width, config.fm_head_dim, config.fm_head_layers)
        self.image_head = nn.ModuleDict({"net": head})
        self.post_init()

    def conditions(self, states: Tensor, first: int = 0) -> Tensor:
        """[B, n, C]: conditions of the tokens from `first` on, of the decoder's last states before them [B, n, H]."""
        if self.config.use_gen_pos_embed:
            last = first + states.shape[1]
            positions = grid_positions(self.config.base_image_grid_size, self.config.hidden_size)
            if last > len(positions):
                raise ValueError(
                    f"an image of {last} tokens or more has no positions: policy.model has {len(positions)} "
                    "(base_image_grid_size in its config.json), so set a smaller sampler.flow.height or width"
                )
            states = states + positions[first:last].to(states)
        return self.image_out_projector(states)

    def velocity(self, noised: Tensor, times: Tensor, conditions: Tensor) -> Tensor:
        """float32 [N, D]: token minus noise, see `FlowHead`."""
        dtype = conditions.dtype
        return self.image_head["net"](noised.to(dtype), times.to(dtype), conditions).float()


@lru_cache(maxsize=4)
def grid_positions(side: int, width: int) -> Tensor:
    """float32 [side * side, width]: sines and cosines of the column, then of the row, of each cell of a grid.

    Token i of an image has the i-th cell, however wide the image is, as in the released pipelines.
    """
    rates = 1 / 10_000 ** (np.arange(width // 4) / (width / 4))
    angles = np.arange(side)[:, None] * rates  # [side, width / 4]
    line = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    columns, rows = np.tile(line, (side, 1)), np.repeat(line, side, axis=0)
    return torch.from_numpy(np.concatenate([columns, rows], axis=1)).float()


def prompt_ids(tokenizer: Any, config: NextStepConfig, text: str, rows: int, columns: int) -> list[int]:
    """The token ids before the tokens of an image."""
    area = tokenizer(f"{AREA}{rows}*{columns}", add_special_tokens=False)["input_ids"]
    if config.boi is None:
        raise ValueError("config.json of policy.model has no boi, the token that begins an image: add its id")
    return [*tokenizer(text)["input_ids"], *area, config.boi]


hf.AutoConfig.register(NextStepConfig.model_type, NextStepConfig)
hf.AutoModelForCausalLM.register(NextStepConfig, NextStep)
