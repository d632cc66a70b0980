"""What is printed is what was written, also where rich would make something else of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mobula.deploy.cli import app


@pytest.mark.parametrize("text", [":b:c", "[red]", "a:smile:b"])
def test_a_value_that_rich_would_read_as_an_image_or_a_style_is_shown_as_it_is(text: str) -> None:
    shown = CliRunner().invoke(app, ["show-config", f"policy.model=\"'{text}'\""])
    assert shown.exit_code == 0, shown.output
    assert text in shown.stdout
    refused = CliRunner().invoke(app, ["show-config", f"{text}=1"])
    assert refused.exit_code == 2
    assert text in refused.stderr


GOES_ON = """
import logging, os, signal, sys
from mobula.deploy.host.terminal import outlive_output, terminal
logging.basicConfig(stream=sys.stderr)
outlive_output()
console = terminal()
sys.stdin.readline()
for _ in range(3):
    console.print("a line", "x " * 20_000, highlight=False)
    print("another one")
    sys.stdout.flush()
    logging.getLogger("any").warning("on stderr")
with open(sys.argv[1], "w") as file:
    file.write("done")
"""


@pytest.mark.parametrize("lost", ["closed pipe", "full disk", "full disk behind both"])
def test_a_process_whose_output_is_lost_goes_on_and_ends_with_0(tmp_path: Path, lost: str) -> None:
    words = [sys.executable, "-c", GOES_ON, str(tmp_path / "out")]
    pipe = subprocess.PIPE
    with open("/dev/full", "w") as full:
        stdout = pipe if lost == "closed pipe" else full
        process = subprocess.Popen(words, stdin=pipe, stdout=stdout, stderr=full if "both" in lost else pipe, text=True)
    if process.stdout is not None:
        process.stdout.close()
    _, errors = process.communicate("go\n", timeout=60)
    assert (tmp_path / "out").read_text() == "done"
    assert process.returncode == 0, errors
    if errors is not None:
        assert errors.count("stdout is lost") == 1 and "Traceback" not in errors


WITHOUT_STREAMS = """
import subprocess, sys
from mobula.deploy.host.terminal import open_missing_streams
open_missing_streams()
with open(sys.argv[1], "w") as file:
    print("stdout")
    sys.stderr.write("stderr")
    assert sys.stdin.read() == ""
    subprocess.run(["sh", "-c", "echo child; echo child >&2"], check=True)
    file.write("done")
"""


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_file_is_not_written_by_what_prints_to_a_closed_stream(tmp_path: Path, closed: str) -> None:
    words = ["sh", "-c", f'exec "$0" -c "$1" "$2" {closed}', sys.executable, WITHOUT_STREAMS, str(tmp_path / "out")]
    assert subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=60).returncode == 0
    assert (tmp_path / "out").read_text() == "done"


def test_a_command_whose_result_is_lost_does_not_end_with_0() -> None:
    with open("/dev/full", "w") as full:
        shown = subprocess.run(
            [sys.executable, "-m", "mobula.deploy.cli", "show-config"], stdout=full, stderr=subprocess.PIPE
        )
    assert shown.returncode != 0


def test_letters_that_the_locale_lacks_are_escaped() -> None:
    program = (
        "from mobula.deploy.host.terminal import write_any_text as w, terminal; w(); terminal().print('gr\\u00fcn')"
    )
    words = [sys.executable, "-X", "utf8=0", "-c", program]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii:strict"}
    shown = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert shown.stdout == "gr\\xfcn\n", shown.stderr
