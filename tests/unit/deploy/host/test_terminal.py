"""What is printed is what was written, also where rich would make something else of it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from deploy.cli import app


@pytest.mark.parametrize("text", [":b:c", "[red]", "a:smile:b"])
def test_a_value_that_rich_would_read_as_a_picture_or_a_style_is_shown_as_it_is(text: str) -> None:
    shown = CliRunner().invoke(app, ["show-config", f"policy.model=\"'{text}'\""])
    assert shown.exit_code == 0, shown.output
    assert text in shown.stdout
    refused = CliRunner().invoke(app, ["show-config", f"{text}=1"])
    assert refused.exit_code == 2
    assert text in refused.stderr
