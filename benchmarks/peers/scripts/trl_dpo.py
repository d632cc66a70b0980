"""TRL's DPOTrainer on pairs of answers to questions with images."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoProcessor
from trl import DPOConfig, DPOTrainer

from benchmarks.peers.step_clock import StepClock, rows_of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, help="a folder of splits with pairs")
    parser.add_argument("--output", required=True)
    for name in ("pairs", "rows", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("beta", "learning-rate"):
        parser.add_argument(f"--{name}", type=float, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(2)
    clock = StepClock()

    class Counting(DPOTrainer):  # type: ignore[misc]  # trl is not in the environment that checks types
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            clock.counted(len(inputs["input_ids"]), int(inputs["completion_mask"].sum()))
            return super().training_step(model, inputs, *args, **kwargs)

    rows = rows_of(asked.data / "train.jsonl")[: asked.rows]
    Counting(
        model=asked.model,
        processing_class=AutoProcessor.from_pretrained(asked.model),
        train_dataset=Dataset.from_list([_pair(row, asked.data) for row in rows]),
        args=DPOConfig(
            output_dir=asked.output,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_length=None,
            beta=asked.beta,
            per_device_train_batch_size=asked.pairs,
            gradient_accumulation_steps=1,
            max_steps=asked.steps,
            learning_rate=asked.learning_rate,
            lr_scheduler_type="constant",
            report_to="none",
            save_strategy="no",
            logging_steps=asked.steps,
            model_init_kwargs={"dtype": "float32"},
        ),
        callbacks=[clock],
    ).train()
    clock.run.print()


def _pair(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One pair: the images first, then the text."""
    question = row["messages"][0]["content"].replace("<image>", "")
    answers = {key: [{"role": "assistant", "content": row[key]}] for key in ("chosen", "rejected")}
    images = [Image.open(folder / name).convert("RGB") for name in row["images"]]
    return {"prompt": [{"role": "user", "content": question}], **answers, "images": images}


if __name__ == "__main__":
    main()
