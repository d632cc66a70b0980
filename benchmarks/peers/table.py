"""Results of works as a committed file and as a table in Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.peers.rounds import Round, ratios
from mobula.cluster.files import write_atomically


@dataclass(frozen=True)
class Result:
    """A work that is done; the peer is the last of the sides."""

    work: str
    date: str  # UTC
    cpu: str
    rounds: Mapping[str, Sequence[Round]]  # by side
    targets: Mapping[str, float]  # of our sides
    equal: str
    unequal: str
    load: float  # processes that were ready to run, of one minute, when it began: above 1, others were at work
    unit: str = "samples"  # whose number a second is compared

    @property
    def peer(self) -> str:
        return list(self.rounds)[-1]

    def over_peer(self, side: str) -> list[float]:
        """Units a second of a side over the peer's, round by round."""
        return ratios(self.rounds[side], self.rounds[self.peer], self.unit)


def read(path: Path) -> dict[str, Result]:
    """Results by work. An absent file has none."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    results = [
        Result(**{**row, "rounds": {side: [Round(**r) for r in rounds] for side, rounds in row["rounds"].items()}})
        for row in rows
    ]
    return {result.work: result for result in results}


def write(path: Path, known: Mapping[str, Result]) -> None:
    """The file appears whole: a command that is killed leaves the old one."""
    rows = [asdict(known[work]) for work in sorted(known)]
    write_atomically(path, json.dumps(rows, indent=2, allow_nan=False) + "\n")


def markdown(known: Mapping[str, Result]) -> list[str]:
    """A row for each work and side, then the equal and the unequal settings of each work."""
    measured = ("samples/s", "tokens/s", "peak MiB", "seconds to held-out 0.9")
    heads = ("work", "side", *measured, "over the peer (rounds)", "target", "met")
    lines = [_line(heads), _line(["---"] * len(heads))]
    lines += [_line(_cells(result, side)) for result in known.values() for side in result.rounds]
    return [*lines, "", *map(_note, known.values())]


def _note(r: Result) -> str:
    return f"- `{r.work}`: {r.unit}/s; equal: {r.equal}. Not equal: {r.unequal}. Load {r.load:.1f}."


def _cells(result: Result, side: str) -> list[str]:
    rounds = result.rounds[side]
    samples, tokens = (median(r.rate(unit) for r in rounds) for unit in ("samples", "tokens"))
    reached = [r.reached_s for r in rounds if r.reached_s is not None]
    cells = [f"`{result.work}`", side, f"{samples:.2f}", f"{tokens:.0f}", f"{max(r.peak_mib for r in rounds):.0f}"]
    cells.append(f"{median(reached):.0f} ({len(reached)} of {len(rounds)} runs)" if reached else "")
    if side == result.peer:
        return [*cells, "", "", ""]
    found, target = result.over_peer(side), result.targets[side]
    spread = f"{median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
    return [*cells, spread, f"{target:g}", "yes" if median(found) >= target else "no"]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
