"""No key of the configuration takes a secret: it is written to the run folder, and trackers get it."""

from __future__ import annotations

import re

import pytest

from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config
from mobula.configs.schema.base import Section
from mobula.configs.schema.run import RunConfig

SECRET = re.compile(r"token|secret|password|passwd|credential|api_?key|auth", re.IGNORECASE)
OF_THE_MODEL = re.compile(r"(^|_)tokens?(_|$)")  # what a language model reads and writes


def names(section: type[Section]) -> list[str]:
    """Every name of a field below a section, `_env` aside: that is the name of a variable."""
    found = []
    for name, field in section.model_fields.items():
        found.append(name)
        stack = [field.annotation]
        while stack:
            part = stack.pop()
            stack += getattr(part, "__args__", ())
            if isinstance(part, type) and issubclass(part, Section):
                found += names(part)
    return found


def test_no_key_is_for_a_secret() -> None:
    known = names(RunConfig)
    assert len(known) > 150
    assert [n for n in known if SECRET.search(n) and not OF_THE_MODEL.search(n) and not n.endswith("_env")] == []


@pytest.mark.parametrize("name", ["api_key", "wandb_token_value", "password", "auth_header"])
def test_such_a_key_would_be_seen(name: str) -> None:
    assert SECRET.search(name)


def test_an_address_with_credentials_is_refused_without_repeating_them() -> None:
    address = "metrics.tracker_address=https://me:s3cret@tracker.example"
    with pytest.raises(ConfigError, match="has credentials for tracker.example") as refused:
        load_config(["experiment=digits", "metrics.trackers=[mlflow]", address])
    assert "s3cret" not in str(refused.value)
