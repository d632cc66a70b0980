"""The environment of a process with a vLLM engine outside Ray."""

from __future__ import annotations

import os

from mobula.cluster.runtime.placement import PlacedWorker
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.spawner import engine_environment

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    "TOKENIZERS_PARALLELISM": "false",
}


def set_engine_environment(config: RunConfig) -> None:
    """Sets the environment variables that vLLM reads at import. Call it before the import."""
    worker = PlacedWorker("rollout", 0, "here", 0, config.resources.rollout.num_gpus, 1, ())
    os.environ.update(OFFLINE | engine_environment(config, worker))
