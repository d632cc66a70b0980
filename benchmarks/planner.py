"""The planner's estimate of every worker's memory over what real runs take at most, on CPU.

A run of a model of some 80 M random weights, with each learner backend, and of a flow model of 93 M; its workers'
processes are looked at all the time. Anonymous memory and mapped files of a process count, the object store does not:
`mobula plan` estimates them as a worker's device and host memory together where the device is the CPU.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import diffusers
import torch
from rich.console import Console
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from benchmarks.harness.measure import QUICK, Claim, Effort, Findings, Measurements
from benchmarks.harness.stage import private_ray, scratch_config, scratch_folder
from mobula.cluster.runtime.placement import needed_roles
from mobula.cluster.runtime.ray_actors import LOGS_FOLDER
from mobula.configs.schema import RunConfig
from mobula.deploy.planning.memory import policy_shape, worker_memory
from mobula.deploy.run.runtime import run_training
from mobula.learner.policies.flow.tiny import write_tiny_flow
from mobula.learner.policies.tiny import TINY

WIDTH, NUM_BLOCKS, NUM_HEADS = 768, 8, 24
TINY_MODEL = TINY["qwen2.5-vl"]
SETTINGS = (
    "resources=laptop",
    "algorithm.prompts_per_step=4",
    "algorithm.samples_per_prompt=4",
    "algorithm.kl.coef=0.01",
    "sampler.max_tokens=64",
    "sampler.vllm.kv_cache_bytes=67108864",
    "sampler.vllm.max_num_batched_tokens=512",
    "sampler.max_model_len=128",
    "sampler.max_images_per_prompt=1",
    "data.max_pixels=3136",  # of a digit: what the estimate is made for is what the run meets
    "learner.learning_rate=1e-6",
    "warm_start.num_steps=0",
    "evaluation.num_prompts=8",
    "evaluation.interval_steps=0",
    "checkpoints.interval_steps=1",  # a copy of the state is written while the next step trains
    "timeouts.start_s=900",
    "timeouts.update_s=900",
    "metrics.num_report_samples=6",
)
SINGLE = ("learner=single", "resources.learner.num_workers=1")
WIDE = ("policy.tiny=none",)
FLOW = (
    "resources=laptop",
    "rewards=jpeg_size",
    "algorithm.prompts_per_step=4",
    "warm_start.num_steps=0",
    "evaluation.num_prompts=4",
    "evaluation.num_samples=1",
    "checkpoints.interval_steps=1",
    "timeouts.start_s=900",
)
FLOW_VARIANTS = {"flow, single": SINGLE, "flow, two ranks": ("learner=fsdp2",)}
VARIANTS = {
    "tiny model": SINGLE,  # a process and its libraries are nearly all that there is
    "single": (*WIDE, *SINGLE),
    "fsdp2, two ranks": (*WIDE, "learner=fsdp2"),
}
QUICK_VARIANTS = ("single",)
NUM_STEPS = 2
LOOK_S = 0.05
MOST = 1.15  # measured over estimated, and the other way round
PROCESS_LINE = re.compile(r"^===== process (\d+) on \S+: (\S+)$", re.MULTILINE)
RESIDENT = re.compile(r"^Rss(?:Anon|File):\s+(\d+) kB$", re.MULTILINE)
MIB = 2**20

_logger = logging.getLogger(__name__)


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """One run a variant; of each role the largest worker counts."""
    names = QUICK_VARIANTS if effort == QUICK else tuple(VARIANTS)
    with scratch_folder() as folder:
        wide, found = _write_model(folder / "wide"), {}
        for name in names:
            model = wide if set(WIDE) <= set(VARIANTS[name]) else folder / "tiny"
            found[name] = _one_run([*SETTINGS, *VARIANTS[name], f"policy.model={model}"], overrides)
        if effort != QUICK:
            settings = [*FLOW, *WIDE, f"policy.model={_write_flow_model(folder)}"]
            for name, own in FLOW_VARIANTS.items():
                found[name] = _one_run([*settings, *own], overrides, experiment="glyphs_grpo")
    return _findings(found)


def _one_run(
    settings: Sequence[str], overrides: Sequence[str], *, experiment: str = "digits"
) -> dict[str, tuple[int, int]]:
    """Role -> bytes measured and estimated."""
    run = [*settings, f"num_steps={NUM_STEPS}"]
    with scratch_config(run, overrides, experiment=experiment) as config, private_ray(config):
        estimated = estimates(config)
        with watched(config.run_folder / LOGS_FOLDER) as peaks:
            run_training(config, Console(stderr=True))
        measured = {role: max(n for worker, n in peaks.items() if worker.startswith(f"{role}/")) for role in estimated}
    found = {role: (measured[role], estimated[role]) for role in estimated}
    _logger.info("MiB measured and estimated: %s", {role: [n // MIB for n in pair] for role, pair in found.items()})
    return found


def estimates(config: RunConfig) -> dict[str, int]:
    shape = policy_shape(config)
    assert shape is not None, "the model is there"
    memory = {role: worker_memory(config, shape, role) for role in needed_roles(config)}
    return {role: found.peak + sum(found.host.values()) for role, found in memory.items()}


@contextmanager
def watched(logs: Path) -> Iterator[Mapping[str, int]]:
    """The most bytes of every worker's process, by worker, while the body runs."""
    peaks: dict[str, int] = {}
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_S):
            for path in logs.glob("*.log"):
                for process_id, worker in PROCESS_LINE.findall(path.read_text(errors="replace")[:4096]):
                    with suppress(OSError):  # it has ended
                        sizes = RESIDENT.findall(Path(f"/proc/{process_id}/status").read_text())
                        peaks[worker] = max(peaks.get(worker, 0), 1024 * sum(map(int, sizes)))

    thread = threading.Thread(target=look, name="look at the workers")
    thread.start()
    try:
        yield peaks
    finally:
        is_over.set()
        thread.join()


def _findings(found: Mapping[str, Mapping[str, tuple[int, int]]]) -> Findings:
    series, claims = {}, []
    for variant, roles in found.items():
        for role, (measured, estimated) in roles.items():
            name = f"{role}, {variant}"
            series[name] = Measurements(f"most memory of a {role} process", "MiB", (measured / MIB,))
            series[f"{name}, estimated"] = Measurements("what `mobula plan` says", "MiB", (estimated / MIB,))
            off = max(measured / estimated, estimated / measured)
            claims.append(Claim(f"{name}: measured and estimated, the larger over the smaller", off, MOST, False))
    settings = {"width": WIDTH, "blocks": NUM_BLOCKS, "parameters": _num_parameters(), "steps": NUM_STEPS}
    return Findings(settings, series, tuple(claims))


def _write_flow_model(folder: Path) -> Path:
    """The tiny model of the glyphs, with a transformer of 93 M parameters."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(write_tiny_flow("sd3_glyphs", folder / "narrow"))
    sizes = {"num_layers": NUM_BLOCKS, "num_attention_heads": 12, "attention_head_dim": 48}
    own = {**pipeline.transformer.config, **sizes, "caption_projection_dim": 576, "pos_embed_max_size": 32}
    pipeline.register_modules(transformer=diffusers.SD3Transformer2DModel.from_config(own))
    pipeline.save_pretrained(folder / "flow")
    return folder / "flow"


def _config(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLConfig:
    """The tiny model's, with a decoder as wide as that of a small released model; heads stay 32 wide."""
    config: Qwen2_5_VLConfig = TINY_MODEL.new_config(tokenizer)
    text = config.text_config
    text.hidden_size, text.intermediate_size, text.num_hidden_layers = WIDTH, 4 * WIDTH, NUM_BLOCKS
    text.num_attention_heads, text.num_key_value_heads = NUM_HEADS, NUM_HEADS // 2
    text.layer_types = ["full_attention"] * NUM_BLOCKS
    config.vision_config.out_hidden_size = WIDTH
    return config


def _write_model(folder: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = TINY_MODEL.new_tokenizer()
    model = Qwen2_5_VLForConditionalGeneration(_config(tokenizer)).to(dtype=torch.float32)
    model.save_pretrained(folder)
    TINY_MODEL.new_processor(tokenizer).save_pretrained(folder)
    return folder


def _num_parameters() -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Qwen2_5_VLForConditionalGeneration(_config()).parameters())
