"""Fixtures that several kinds of tests share."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says nothing about what it shows, and a busy machine takes longer.
settings.register_profile("mobula", deadline=None)
settings.load_profile("mobula")

BY_TWO = ("architecture", "unit", "invariants")  # kinds of tests whose files may run beside each other


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The quick kinds first; `make test` gives two workers a file each, and what starts engines or Ray to one of them,
    alone, when those are done: such tests share their processes, and have both cores to themselves."""
    folder = Path(__file__).parent
    kinds = {item: item.path.relative_to(folder).parts[0] for item in items}
    items.sort(key=lambda item: BY_TWO.index(kinds[item]) if kinds[item] in BY_TWO else len(BY_TWO))
    for item in items:
        group = str(item.path.relative_to(folder)) if kinds[item] in BY_TWO else "one at a time"
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def local_ray() -> Iterator[str]:
    """A private two-CPU Ray cluster, started once for all integration tests; its namespace is the fixture's value.

    Its folder is made directly below /tmp: a Unix socket's path may have 107 characters at most.
    """
    import deploy.ray_defaults  # noqa: F401  isort: skip  (sets what ray reads when imported)
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
