"""Services that the command refuses before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from mobula.cluster.errors import PreflightError
from mobula.cluster.serving import Address
from mobula.configs.load import load_config
from mobula.deploy.training_service.serving import ServeTrainingOptions, serve
from mobula.deploy.training_service.tenants import Tenants

TWO = {"ada": "tml-the-key-of-tenant-ada", "bob": "tml-the-key-of-tenant-bob"}


@pytest.mark.parametrize(
    ("words", "host", "tokens", "reason"),
    [
        ([], "0.0.0.0", {}, "no token: give --tenants"),
        (["training_service.weights=full"], "127.0.0.1", TWO, "serves one tenant, and --tenants names 2"),
        (
            ["training_service.weights=full", "sampler.adapters.max_served=2"],
            "127.0.0.1",
            {},
            "max_served=2 freezes the weights",
        ),
        (["learner=deepspeed"], "127.0.0.1", {}, "learner.backend=deepspeed does not go with a training service"),
        (
            ["training_service.weights=full", "learner.optimizer=muon"],
            "127.0.0.1",
            {},
            "learner.optimizer=muon does not go with a training service: set learner.optimizer to adamw",
        ),
    ],
)
def test_unfit_services_are_refused(
    tmp_path: Path, words: list[str], host: str, tokens: Mapping[str, str], reason: str
) -> None:
    config = load_config([*words, f"policy.model={tmp_path}"], is_complete=False)
    options = ServeTrainingOptions(Address(host, 0, None), Tenants(tokens), tmp_path, None)
    with pytest.raises(PreflightError, match=reason):
        serve(config, options, lambda url: None)
