"""`mobula train` with a tiny model in a separate process, and what its summary must say."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.configs.groups import SMALL_EXAMPLE
from mobula.deploy.host.process_group import last_lines, run_logged
from mobula.deploy.tools.gpu_check.context import Context, Figures
from mobula.deploy.tools.gpu_check.training import CLOSE

ROOT = Path(__file__).parents[3]
NUM_STEPS = 3
TIMEOUT_S = 840.0
LOG_LINES = 20
WORDS = (
    f"experiment={SMALL_EXAMPLE}",
    f"num_steps={NUM_STEPS}",
    "warm_start.num_steps=2",
    "warm_start.check_interval=2",
    "warm_start.max_checks_rows=8",
    "evaluation.num_prompts=16",
    "algorithm.prompts_per_step=4",
    "algorithm.max_concurrent_groups=8",
    "sampler.vllm.kv_cache_bytes=1073741824",
    "weight_sync.canary_interval=1",
    "metrics.progress=false",
)


def run_job(context: Context, preset: str) -> Figures:
    """Train on `preset`; every push must arrive and engine and learner must agree.

    Raises:
        AssertionError: the job failed, or its summary says otherwise.
    """
    folder = context.folder / preset
    folder.mkdir(parents=True)
    own = (f"resources={preset}", f"folder={folder}", "name=job", f"policy.model={folder / 'model'}")
    command = ("-m", "mobula.deploy.cli", "train", *WORDS, *own, f"data.path={folder / 'data'}")
    log = folder / "output.txt"
    code = run_logged([sys.executable, *command], os.environ, ROOT, log, TIMEOUT_S)
    assert code == 0, f"`mobula train resources={preset}` ended with {code}: {' | '.join(last_lines(log, LOG_LINES))}"
    summary = read_run_folder(folder / "job").summary
    assert summary is not None, "the job wrote no summary"
    assert (summary.status, summary.version) == ("done", NUM_STEPS), (
        f"the job is {summary.status} at version {summary.version}"
    )
    close = CLOSE["bfloat16" if context.is_cuda else "float32"]
    assert summary.logprob_gap_mean is not None and summary.canary_max is not None
    assert summary.logprob_gap_mean <= close, f"engine and learner differ by {summary.logprob_gap_mean:.3g} nat"
    figures = {"gap_nat": summary.logprob_gap_mean, "canary_nat": summary.canary_max, "wall_s": summary.wall_s}
    return {f"{preset}_{name}": value for name, value in figures.items()}
