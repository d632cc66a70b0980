"""The stages of the GPU check, in the order in which they run."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

ENGINE = ("vllm", "ray")
JOB = (*ENGINE, "typer", "rich")


@dataclass(frozen=True)
class CheckStage:
    """One row of the table; `mobula.deploy.tools.gpu_check.stages.NAME` has its `run`."""

    name: str
    title: str
    timeout_s: float
    packages: tuple[str, ...] = ()  # that it imports besides torch, transformers, peft, Hydra and pydantic
    num_gpus: int = 0  # at least; 0 runs on `--device cpu` as well
    is_long: bool = False  # runs by name or with `--all` where the device is a CPU
    missing: str = ""  # why no machine can run it yet

    def unmet(self, num_gpus: int) -> str:
        """What is missing on a machine with `num_gpus` GPUs that torch can use; empty if nothing is."""
        if self.missing:
            return self.missing
        absent = [name for name in self.packages if find_spec(name) is None]
        if absent:
            return f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed"
        if num_gpus < self.num_gpus:
            return f"{self.num_gpus} GPU{'s' if self.num_gpus > 1 else ''} that torch can use; there are {num_gpus}"
        return ""


STAGES = (
    CheckStage("torch_cuda", "torch and CUDA", 180),
    CheckStage("learner", "learner with the transformers sampler", 300),
    CheckStage("packing", "packed rows against row by row", 300),
    CheckStage("sharding", "FSDP2 on one and on more ranks", 400),
    CheckStage("flow", "flow policy and its kernels", 200),
    CheckStage("flow_sampler", "flow sampler and learner", 300, ("diffusers",)),
    CheckStage("logprob_memory", "memory of chunked log-probs", 300),
    CheckStage("sleep", "sleep and wake of sampler and learner", 300),
    CheckStage("engine", "vLLM engine: parity, push, canary", 600, ENGINE),
    CheckStage("nccl_push", "push over NCCL", 900, JOB, num_gpus=2),
    CheckStage("tensor_parallel", "vLLM engine over two GPUs", 600, ENGINE, num_gpus=2),
    CheckStage(
        "colocated_ipc", "colocated push by CUDA IPC", 1, missing="its test is tests/gpu/test_transfer_on_gpus.py"
    ),
    CheckStage("main_job", "main job", 900, JOB, is_long=True),
    CheckStage("pretrained", "a pretrained model", 600),
    CheckStage("throughput", "tokens per second, memory and MFU", 600),
)


def stage_named(name: str) -> CheckStage:
    """The stage of this name.

    Raises:
        ValueError: there is none.
    """
    for stage in STAGES:
        if stage.name == name:
            return stage
    raise ValueError(f"{name} is no stage of the GPU check: choose {', '.join(s.name for s in STAGES)}")
