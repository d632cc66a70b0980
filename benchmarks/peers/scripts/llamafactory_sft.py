"""LLaMA-Factory's SFT with packed rows that do not attend to each other (`neat_packing`), loss on the answers alone."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer
from llamafactory.train.tuner import run_exp

from benchmarks.peers.step_clock import StepClock

ROLES = {f"{role}_tag": role for role in ("system", "user", "assistant")}
COLUMNS = {"role_tag": "role", "content_tag": "content", **ROLES}


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
    trained = CustomSeq2SeqTrainer.training_step

    def training_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        clock.counted_labels(inputs["labels"])
        return trained(self, model, inputs, *args, **kwargs)

    CustomSeq2SeqTrainer.training_step = training_step
    output = Path(asked.output)
    output.mkdir(parents=True)
    source = {"file_name": str((asked.data / "train.jsonl").resolve()), "formatting": "sharegpt"}
    known = {"rows": {**source, "columns": {"messages": "messages"}, "tags": COLUMNS}}
    (output / "dataset_info.json").write_text(json.dumps(known), encoding="utf-8")
    run_exp(
        {
            "model_name_or_path": asked.model,
            "stage": "sft",
            "finetuning_type": "full",
            "do_train": True,
            "dataset": "rows",
            "dataset_dir": str(output),
            "template": "chatml",
            "cutoff_len": asked.row_tokens,
            "neat_packing": True,
            "flash_attn": "sdpa",
            "disable_gradient_checkpointing": True,
            "output_dir": str(output / "trained"),
            "use_cpu": True,
            "per_device_train_batch_size": asked.rows,
            "gradient_accumulation_steps": 1,
            "max_steps": asked.steps,
            "learning_rate": asked.learning_rate,
            "lr_scheduler_type": "constant",
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": asked.steps,
        },
        callbacks=[clock],
    )
    clock.run.print()


if __name__ == "__main__":
    main()
