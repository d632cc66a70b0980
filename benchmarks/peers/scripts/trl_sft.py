"""TRL's SFTTrainer with best-fit packing, loss on the answers alone."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from benchmarks.peers.step_clock import StepClock, rows_of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, help="a folder of splits with messages")
    parser.add_argument("--output", required=True)
    for name in ("row-tokens", "rows", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(2)
    clock = StepClock()

    class Counting(SFTTrainer):  # type: ignore[misc]  # trl is not in the environment that checks types
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            clock.counted_labels(inputs["labels"])
            return super().training_step(model, inputs, *args, **kwargs)

    chats = [row["messages"] for row in rows_of(asked.data / "train.jsonl")]
    Counting(
        model=asked.model,
        processing_class=AutoTokenizer.from_pretrained(asked.model),
        train_dataset=Dataset.from_list([{"prompt": chat[:-1], "completion": chat[-1:]} for chat in chats]),
        args=SFTConfig(
            output_dir=asked.output,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            packing=True,
            max_length=asked.row_tokens,
            per_device_train_batch_size=asked.rows,
            gradient_accumulation_steps=1,
            max_steps=asked.steps,
            learning_rate=asked.learning_rate,
            lr_scheduler_type="constant",
            report_to="none",
            save_strategy="no",
            logging_steps=asked.steps,
            model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        ),
        callbacks=[clock],
    ).train()
    clock.run.print()


if __name__ == "__main__":
    main()
