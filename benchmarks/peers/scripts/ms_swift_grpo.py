"""ms-swift's GRPO on the prompts of a Mobula data set; transformers generates, as its vLLM mode needs a GPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from swift import RLHFArguments, TrainerCallback, callbacks_map, rlhf_main
from swift.rewards import ORM, orms
from swift.template.templates.qwen import Qwen2VLTemplate
from transformers import AutoTokenizer

from benchmarks.peers.step_clock import StepClock, rows_of

MEDIA_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, help="a split of a Mobula data set")
    parser.add_argument("--output", type=Path, required=True)
    for name in ("prompts", "samples", "tokens", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("kl", "temperature", "learning-rate"):
        parser.add_argument(f"--{name}", type=float, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(2)
    clock = StepClock()

    class Right(ORM):  # type: ignore[misc]  # swift is not in the environment that checks types
        def __call__(self, completions: list[str], solution: list[str], **given: Any) -> list[float]:
            clock.counted(len(completions), sum(map(len, given["response_token_ids"])))
            return [float(right in text) for right, text in zip(solution, completions, strict=True)]

    class Clock(TrainerCallback):  # type: ignore[misc]
        on_train_begin = staticmethod(clock.on_train_begin)
        on_step_end = staticmethod(clock.on_step_end)

    _fit_template(asked.model)
    orms["right"], callbacks_map["clock"] = Right, Clock
    asked.output.mkdir(parents=True)
    rows = asked.output / "rows.jsonl"
    lines = [json.dumps(_row(row, asked.data.parent)) for row in rows_of(asked.data)]
    rows.write_text("\n".join(lines), encoding="utf-8")
    rlhf_main(
        RLHFArguments(
            rlhf_type="grpo",
            model=asked.model,
            model_type="qwen2_5_vl",
            template="qwen2_5_vl",
            system="",  # as in the model's own template
            tuner_type="full",
            freeze_vit=False,
            freeze_aligner=False,
            torch_dtype="float32",
            attn_impl="sdpa",
            use_cpu=True,
            bf16=False,
            dataset=[str(rows)],
            split_dataset_ratio=0,
            dataloader_num_workers=0,
            reward_funcs=["right"],
            callbacks=["clock"],
            use_vllm=False,
            num_generations=asked.samples,
            per_device_train_batch_size=asked.prompts * asked.samples,
            gradient_accumulation_steps=1,
            gradient_checkpointing=False,
            max_completion_length=asked.tokens,
            max_steps=asked.steps,
            beta=asked.kl,
            temperature=asked.temperature,
            learning_rate=asked.learning_rate,
            lr_scheduler_type="constant",
            report_to=["none"],
            save_strategy="no",
            eval_strategy="no",
            logging_steps=asked.steps,
            output_dir=str(asked.output / "trained"),
        )
    )
    clock.run.print()


def _fit_template(model: str) -> None:
    """Its template has the released tokenizer's ids of image tokens written in, and samples image tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    media = [tokenizer.convert_tokens_to_ids(token) for token in MEDIA_TOKENS]
    generate = Qwen2VLTemplate.generate

    def without_media(self: Any, *args: Any, **kwargs: Any) -> Any:
        return generate(self, *args, suppress_tokens=media, **kwargs)

    Qwen2VLTemplate.image_token_id, Qwen2VLTemplate.video_token_id = media[2:]
    Qwen2VLTemplate.generate = without_media


def _row(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    images = row.get("image", [])
    names = [images] if isinstance(images, str) else images
    messages = [{"role": "user", "content": row["question"]}]
    return {"messages": messages, "solution": row["solution"], "images": [str((folder / n).resolve()) for n in names]}


if __name__ == "__main__":
    main()
