"""Runs the recipes sl_basic and rl_basic of tinker-cookbook on local data: RECIPE URL MODEL FOLDER.

Run with the Python of `.venv-tinker-cookbook`, which has no `mobula`. The recipes' own `main` and training loops run
unchanged; only their configuration is ours.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

RENDERER = "role_colon"


def main() -> None:
    recipe, url, model, folder = sys.argv[1:]
    if recipe == "sl_basic":
        run_sl_basic(url, model, Path(folder))
    else:
        run_rl_basic(url, model, Path(folder), SIZES[recipe])


def run_sl_basic(url: str, model: str, folder: Path) -> None:
    """Fine-tunes on conversations in a file."""
    from tinker_cookbook.recipes import sl_basic
    from tinker_cookbook.renderers import TrainOnWhat
    from tinker_cookbook.supervised import train
    from tinker_cookbook.supervised.data import FromConversationFileBuilder
    from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

    answers = [(f"What is {a} + {b}?", str(a + b)) for a in range(4) for b in range(4)]
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in answers
    ]
    file = folder / "conversations.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model,
        renderer_name=RENDERER,
        max_length=128,
        batch_size=8,
        train_on_what=TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    )
    config = train.Config(
        log_path=str(folder / "log"), model_name=model, recipe_name="recipe_sl_basic", renderer_name=RENDERER,
        dataset_builder=FromConversationFileBuilder(common_config=common, file_path=str(file)), learning_rate=2e-3,
        num_epochs=6, lora_rank=8, base_url=url, save_every=4,
    )  # fmt: skip
    sl_basic.main(config)


@dataclass(frozen=True)
class Size:
    """How much rl_basic trains."""

    num_batches: int
    prompts: int  # of a batch
    samples: int  # of a prompt
    max_tokens: int
    learning_rate: float


SIZES = {"rl_basic": Size(3, 2, 4, 8, 1e-3), "rl_basic_pretrained": Size(20, 8, 8, 12, 5e-4)}


def run_rl_basic(url: str, model: str, folder: Path, size: Size) -> None:
    """Trains on sums with a reward."""
    from tinker_cookbook.recipes import rl_basic
    from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
    from tinker_cookbook.rl import train

    builder = ArithmeticDatasetBuilder(
        batch_size=size.prompts,
        group_size=size.samples,
        n_batches=size.num_batches,
        model_name_for_tokenizer=model,
        renderer_name=RENDERER,
    )
    config = train.Config(
        log_path=str(folder / "log"), model_name=model, recipe_name="recipe_rl_basic", renderer_name=RENDERER,
        dataset_builder=builder, learning_rate=size.learning_rate, max_tokens=size.max_tokens, lora_rank=8,
        base_url=url, eval_every=0, save_every=2,
    )  # fmt: skip
    rl_basic.main(config)


if __name__ == "__main__":
    main()
