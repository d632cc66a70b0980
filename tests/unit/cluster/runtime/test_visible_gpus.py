"""A process sees the GPUs that it books."""

from __future__ import annotations

import pytest

from mobula.cluster.runtime.ray_actors import gpu_environment
from mobula.cluster.runtime.usage import visible


def test_a_process_that_books_no_gpu_sees_none() -> None:
    hidden = gpu_environment(0)["CUDA_VISIBLE_DEVICES"]
    assert visible(hidden, ["GPU-a", "GPU-b"]) == []


@pytest.mark.parametrize("num_gpus", [0.3, 1, 2])
def test_ray_chooses_the_gpus_of_a_process_that_books_some(num_gpus: float) -> None:
    found = gpu_environment(num_gpus)
    assert "CUDA_VISIBLE_DEVICES" not in found
    assert found["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "0", "a node's setting would leave it all GPUs"
