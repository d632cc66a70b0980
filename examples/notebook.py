# %% [markdown]
# Train the small model on handwritten digits from Python. Each cell runs in a notebook or in a script, from the root of
# the repository; results are in `runs/notebook`.

# %%
from pathlib import Path

import mobula

config = mobula.load_config(
    [
        "experiment=digits",
        "resources=laptop",  # gpu_1 or two_gpu with GPUs
        "name=notebook",
        "num_steps=20",
        "resume=auto",  # the same cell again goes on from the newest checkpoint
    ]
)

# %% What would run where, and does it fit?
for demand in mobula.plan(config).demands:
    print(f"{demand.place}: {demand.num_bytes / 2**30:.1f} GiB for {', '.join(demand.workers)}")

# %% A run is a process of its own; its log is printed here.
run = mobula.train(
    config, on_step=lambda step: print(f"step {step.step}: mean reward {step.values['reward_mean']:.3f}")
)

# %%
print(run.metrics.select(["step", "reward_mean", "total_s"]).to_pandas())
print(f"held-out accuracy: {run.summary.accuracy_before} -> {run.summary.accuracy_after}; see {run.report}")

# %% In a notebook: the report with its charts.
run.plot()

# %% Why does it not learn? The findings, worst first.
for finding in mobula.diagnose(run)[:3]:
    print(f"{finding.verdict}: {finding.name}: {finding.measured}")

# %% The policy for transformers, and its accuracy.
policy = run.export(output=Path("runs/notebook-policy"))
[result] = mobula.evaluate(run)
print(f"{policy}: {result.measure} {result.accuracy:.3f} ({result.low:.3f} to {result.high:.3f})")
