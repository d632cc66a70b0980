"""Measure families and write docs/models.md: `python -m benchmarks.conformance [NAME ...]`.

Without names all tiny models are measured; `NAME+tied` ties the embeddings. Reports are stored in data/conformance; the
page shows all of them.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.conformance.measure import REPORT, TIED, Report, read_report
from benchmarks.conformance.table import failures, page
from mobula.learner.policies.tiny import TINY

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TIMEOUT_S = 600  # of one model

log = logging.getLogger(__name__)


def measure_apart(names: Sequence[str], folder: Path) -> dict[str, Report]:
    """Measures tiny models in sequence in one child process; `folder`/NAME has the files of each.

    Raises:
        subprocess.CalledProcessError: a measurement failed; `folder`/log says why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.rmtree(folder / name, ignore_errors=True)
    with (folder / "log").open("w", encoding="utf-8") as output:
        subprocess.run(
            [sys.executable, "-m", "benchmarks.conformance.measure", str(folder), *names],
            stdout=output, stderr=subprocess.STDOUT, timeout=TIMEOUT_S * len(names), check=True,
        )  # fmt: skip
    return {name: read_report(folder / name / REPORT) for name in names}


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(TINY)}; with {TIED}: tied embeddings")
    parser.add_argument("--folder", type=Path, default=Path("data/conformance"))
    parser.add_argument("--page-only", action="store_true", help="measure nothing")
    args = parser.parse_args()
    names = [] if args.page_only else args.names or list(TINY)
    unknown = [name for name in names if name.removesuffix(TIED) not in TINY]
    if unknown:
        parser.error(f"there is no tiny model {unknown[0]}: choose {', '.join(TINY)}")
    for name, report in (measure_apart(names, args.folder) if names else {}).items():
        log.info("%s: %s", name, "; ".join(failures(report)) or "conforms")
    reports = [read_report(file) for file in sorted(args.folder.glob(f"*/{REPORT}"))]
    PAGE.write_text(page(reports), encoding="utf-8")
    log.info("wrote %s with %d rows", PAGE, len(reports))
    return int(any(failures(report) for report in reports))


if __name__ == "__main__":
    sys.exit(main())
