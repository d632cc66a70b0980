"""A user's code that does not fit is one message of the command, without a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mobula.deploy.cli import app


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("algorithm.loss={file}:lost", "{file} has no lost (did you mean 'loss'?)"),
        ("algorithm.loss={file}:loss", "it takes (x), and is called with (logprobs, old_logprobs, advantages, mask)"),
        ("rewards.components.0.function={file}:scor", "did you mean 'score'?"),
    ],
)
def test_code_that_does_not_fit_is_one_message(word: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def loss(x):\n    return x\n\n\ndef score(request, **options):\n    return 0.0\n")
    result = CliRunner().invoke(app, ["show-config", "experiment=digits", word.format(file=file)])
    assert result.exit_code == 2, result.output
    assert message.format(file=file) in result.output.replace("\n", " ")
