"""Imports go one way between packages, and heavy libraries stay behind their walls."""

from __future__ import annotations

import re
from fnmatch import fnmatch

import pytest
from sources import PACKAGES, Source, parse, sources

# What each package may import of the project, itself aside. DESIGN: configs <- cluster <- siblings <- deploy.
ALLOWED: dict[str, tuple[str, ...]] = {
    "configs": (),
    "cluster": ("configs",),
    "rewards": ("configs", "cluster"),
    "learner": ("configs", "cluster"),
    "actors": ("configs", "cluster", "learner.policies"),
    "deploy": ("configs", "cluster", "rewards", "learner", "actors"),
    "examples": ("configs", "cluster", "rewards", "learner", "actors"),  # plug-ins: nothing imports them
}

# Who may import each walled library, as patterns of paths.
WALLS: dict[str, tuple[str, ...]] = {
    "ray": ("cluster/*", "deploy/*"),
    "vllm": ("actors/samplers/vllm/*", "rewards/models/vllm_judge.py"),
    "deepspeed": ("learner/backends/deepspeed.py",),
    "peft": ("learner/policies/adapters.py",),
    "diffusers": ("learner/policies/flow/*",),
    "tensorboard": ("cluster/metrics/sinks/*",),
    "torch.utils.tensorboard": ("cluster/metrics/sinks/*",),
    "mlflow": ("cluster/metrics/sinks/*",),
    "trackio": ("cluster/metrics/sinks/*",),
    "wandb": ("cluster/metrics/sinks/*",),
    "opentelemetry": ("cluster/tracing/telemetry.py",),
    "hydra": ("configs/load.py", "configs/overrides.py"),
    "omegaconf": ("configs/load.py",),
    "typer": ("deploy/cli/*", "deploy/*/options.py", "deploy/checks/lmms_eval.py"),
    "tinker": ("deploy/training_service/*",),
    "torch": ("cluster/*", "learner/*", "actors/*", "rewards/*", "deploy/*"),
    "transformers": ("learner/*", "actors/*", "rewards/models/*"),
    "mpmath": ("rewards/functions/*",),
    "verifiers": ("actors/environments/programs/*",),  # which runs in a Python of its own
}

BARE = rf"^ *(?:from|import) (?:{'|'.join(PACKAGES)})\b.*"


def is_below(name: str, root: str) -> bool:
    return name == root or name.startswith(f"{root}.")


def wrong_arrows(source: Source) -> list[str]:
    """Imports of this file that go against the direction."""
    allowed = (source.package, *ALLOWED[source.package])
    return [
        f"{source.path} imports {name}"
        for name in source.imports()
        if name.split(".")[0] in PACKAGES and not any(is_below(name, root) for root in allowed)
    ]


def breached_walls(source: Source) -> list[str]:
    """Imports of this file that reach through a wall."""
    return [
        f"{source.path} imports {name}, which stays in {', '.join(homes)}"
        for name in source.imports()
        for library, homes in WALLS.items()
        if is_below(name, library) and not any(fnmatch(source.path, home) for home in homes)
    ]


def test_packages_import_one_way() -> None:
    assert [arrow for source in sources() for arrow in wrong_arrows(source)] == []


def test_libraries_stay_behind_their_walls() -> None:
    assert [breach for source in sources() for breach in breached_walls(source)] == []


def test_the_project_is_imported_as_one_package() -> None:
    """A name such as `rewards` at the top may be a module of the user's."""
    bare = [f"{s.path}: {word}" for s in sources() for word in re.findall(BARE, s.text, re.MULTILINE)]
    assert bare == []


def test_the_code_reaches_no_test() -> None:
    reached = [f"{s.path} imports {name}" for s in sources() for name in s.imports() if is_below(name, "tests")]
    assert reached == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("configs/x.py", "import cluster.errors"),
        ("cluster/x.py", "from actors.rollout.actor import RolloutActor"),
        ("rewards/x.py", "def f():\n    from learner.learner import Learner"),
        ("learner/x.py", "from actors import samplers"),
        ("actors/x.py", "from learner.learner import Learner"),
        ("actors/x.py", "from learner import learner"),
        ("learner/x.py", "from deploy.wiring.build import build"),
    ],
)
def test_an_arrow_against_the_direction_is_seen(path: str, text: str) -> None:
    assert len(wrong_arrows(parse(path, text))) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("cluster/weight_sync/x.py", "import vllm"),
        ("learner/learner.py", "import ray"),
        ("configs/load.py", "import torch"),
        ("learner/backends/native.py", "from deepspeed import zero"),
        ("deploy/x.py", "from torch.utils.tensorboard import SummaryWriter"),
    ],
)
def test_a_breached_wall_is_seen(path: str, text: str) -> None:
    assert len(breached_walls(parse(path, text))) == 1


def test_what_the_design_allows_is_allowed() -> None:
    sampler = parse("actors/samplers/vllm/sampler.py", "import vllm, torch\nfrom learner.policies.logprobs import f")
    assert wrong_arrows(sampler) + breached_walls(sampler) == []
