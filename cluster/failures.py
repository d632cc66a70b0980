"""Failures of workers: causes, and errors in one line."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # of libraries: colours, and moves of the cursor

# C0 and C1 without tab and line feed, and characters that change the direction of a line.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
MAX_DETAIL = 120  # characters of each line that is shown of an error of several lines
MAX_LINE = 400  # characters of an error of one line


def in_one_line(error: Exception) -> str:
    """Returns the text of an error, shortened for a table; of several lines the first and the last."""
    lines = [line.strip() for line in COLOUR.sub("", str(error)).strip().splitlines()]
    if len(lines) < 2:
        return _cut("".join(lines), MAX_LINE)
    return " ... ".join(_cut(line, MAX_DETAIL) for line in (lines[0], lines[-1]))


def escaped(text: str) -> str:
    """Returns the text with every control character as `\\u001b`, which is valid in JSON as well."""
    return CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _cut(line: str, length: int) -> str:
    return line if len(line) <= length else f"{line[: length - 3].rstrip()}..."


NUM_FRAMES = 3  # stack frames in a failure
MAX_MESSAGE = 300  # characters of an exception's message in a failure
MAX_TRACEBACK = 20_000  # last characters of a traceback in a failure, so that it fits into a pipe
WRAPPERS = ("contextlib.py", "vllm/tracing/otel.py")  # wrapper files, whose frames are left out
FRAME = re.compile(r'File "(.+?)", line (\d+),? in (\S+)')  # as a printed stack shows it
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)  # caused by the process itself


@dataclass(frozen=True)
class Failure:
    """Why one process or engine ended. `fingerprint` is equal for equal causes. It is None if the process was killed
    from outside (SIGKILL, out of memory), so that its work is not the cause."""

    summary: str  # "RuntimeError: CPU Generator does not ...", or "its process was ended by signal 9 (SIGKILL)"
    frames: tuple[str, ...] = ()  # innermost first: "vllm/v1/worker/gpu_model_runner.py:3210 in _bookkeeping_sync"
    traceback: str = ""
    fingerprint: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        stack = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.endswith(WRAPPERS)]
        innermost = stack[: -NUM_FRAMES - 1 : -1]
        message = " ".join(str(error).split())
        if len(message) > MAX_MESSAGE:
            message = f"{message[: MAX_MESSAGE - 3].rstrip()}..."
        return cls(
            summary=f"{type(error).__name__}: {message}" if message else type(error).__name__,
            frames=tuple(f"{_short(frame.filename)}:{frame.lineno} in {frame.name}" for frame in innermost),
            traceback="".join(traceback.format_exception(error))[-MAX_TRACEBACK:],
            # Without the message: ids and numbers in it may differ between equal causes.
            fingerprint="|".join([type(error).__qualname__, *(f"{f.filename}:{f.lineno}" for f in innermost)]),
        )

    @classmethod
    def of_exit(cls, exit_code: int | None, process: str) -> Failure:
        """Returns the failure of a process that ended without an exception; `exit_code` is negative for a signal."""
        if exit_code is None:
            return cls(f"{process} does not answer, and its exit code is not known")
        if exit_code >= 0:
            return cls(f"{process} ended with exit code {exit_code} and left no exception")
        number = -exit_code
        name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
        is_crash = number in CRASHES
        return cls(
            summary=f"{process} {'crashed with' if is_crash else 'was ended by'} signal {number} ({name})",
            fingerprint=f"signal {number}" if is_crash else None,
        )

    def __str__(self) -> str:
        """One line: the summary and the innermost frames."""
        return self.summary + at_frames(self.frames)


def cause_in_one_line(error: BaseException) -> str:
    """Returns class, first part of the message and innermost frames of an exception; the frames of the worker if it was
    raised in one, whose traceback is a note."""
    failure = Failure.of(error)
    remote = frames_in("\n".join(getattr(error, "__notes__", ())))
    return str(replace(failure, frames=remote or failure.frames))


def at_frames(frames: Sequence[str]) -> str:
    """Returns the frames of an exception as text to append to its message; empty without frames."""
    if not frames:
        return ""
    first, *callers = frames
    return f" at {first}" + (f", called from {', '.join(callers)}" if callers else "")


def _short(filename: str) -> str:
    parts = Path(filename).parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            return "/".join(parts[parts.index(folder) + 1 :])
    return str(Path(*parts[-3:]))


def frames_in(text: str, *, is_innermost_first: bool = False) -> tuple[str, ...]:
    """Returns the innermost frames of a printed stack, innermost first; none if the text has none.

    A traceback ends with the innermost frame; the stack of a crash begins with it.
    """
    frames = [frame for frame in FRAME.findall(text) if not frame[0].endswith(WRAPPERS)]
    innermost = frames[:NUM_FRAMES] if is_innermost_first else frames[: -NUM_FRAMES - 1 : -1]
    return tuple(f"{_short(filename)}:{line} in {function}" for filename, line, function in innermost)
