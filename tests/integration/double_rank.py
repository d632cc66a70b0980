"""One rank of the runs of a critic and of offline jobs (`test_algorithms_on_ranks.py`), in float64:

    python tests/integration/double_rank.py RANK NUM_RANKS MODEL OUT

Rank 0 writes weights and metrics of each job to OUT/JOB/seen.pt. `write_model` writes MODEL.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "integration")]

JOBS = ("critic", "sft", "dpo", "reward_model")
SHARING = ("learner=fsdp2", "resources.learner.num_workers=2", "learner.sequence_parallel=2")


def write_model(folder: Path) -> None:
    from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

    file = write_tiny_qwen2_5_vl(folder, seed=0) / "model.safetensors"
    save_file({name: tensor.double() for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


def train(job: str, rank: int, num_ranks: int, model: Path, out: Path) -> None:
    import backend_run
    import offline_rows
    import test_algorithms_on_ranks
    import test_critic_on_ranks as critic

    words = SHARING if num_ranks > 1 else ()
    if job == "critic":
        critic.train(backend_run.config_of(model, *critic.WORDS, *words), rank, num_ranks, out)
    else:
        test_algorithms_on_ranks.train_offline(offline_rows.config_of(model, job, *words), job, rank, num_ranks, out)


def main(rank: int, num_ranks: int, model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    # Code that names float32 gets float64, in transformers too: modules are imported after this.
    torch.float32 = torch.float64
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    torch.set_default_dtype(torch.float64)
    from mobula.learner.policies.checkpoint import DTYPES

    DTYPES[torch.float64] = "F64"  # now the value of torch.float32 too, which stands behind it in the table
    for job in JOBS:
        (out / job).mkdir(parents=True, exist_ok=True)
        train(job, rank, num_ranks, model, out / job)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
