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
result = mobula.train(config)

# %%
for step in result.records().steps:
    print(f"step {step.step}: mean reward {step.values['reward_mean']:.3f}")
print(f"held-out accuracy: {result.summary.accuracy_before} -> {result.summary.accuracy_after}; see {result.report}")

# %% The policy for transformers, and its accuracy as a checkpoint.
policy = mobula.export(result.folder, output=Path("runs/notebook-policy"))
[accuracy] = mobula.evaluate(mobula.load_config(["experiment=digits", "resources=laptop", f"policy.model={policy}"]))
print(f"{policy}: {accuracy.accuracy:.3f} ({accuracy.low:.3f} to {accuracy.high:.3f})")
