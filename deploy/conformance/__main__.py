"""Measure families and write docs/models.md: `python -m deploy.conformance [NAME ...]`.

Without names all tiny models are measured, one process after the other; `NAME+tied` ties the embeddings. Reports are
kept in data/conformance, and the page has all that lie there.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import subprocess
import sys
from pathlib import Path

from deploy.conformance.measure import REPORT, read_report
from deploy.conformance.table import failures, page
from learner.policies.tiny import TINY

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TIED = "+tied"
TIMEOUT_S = 1200

log = logging.getLogger(__name__)


def measure_apart(name: str, folder: Path) -> None:
    """Measure the tiny model `name` in a process of its own, which writes `folder`.

    Raises:
        subprocess.CalledProcessError: it failed; `folder`/log says why.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = [name.removesuffix(TIED), str(folder), *(["--tied"] if name.endswith(TIED) else [])]
    with (folder / "log").open("w", encoding="utf-8") as output:
        subprocess.run(
            [sys.executable, "-m", "deploy.conformance.measure", *words],
            stdout=output, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=True,
        )  # fmt: skip


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(TINY)}; with {TIED}: tied embeddings")
    parser.add_argument("--folder", type=Path, default=Path("data/conformance"))
    parser.add_argument("--page-only", action="store_true", help="measure nothing")
    asked = parser.parse_args()
    names = [] if asked.page_only else asked.names or list(TINY)
    unknown = [name for name in names if name.removesuffix(TIED) not in TINY]
    if unknown:
        parser.error(f"there is no tiny model {unknown[0]}: choose {', '.join(TINY)}")
    for name in names:
        measure_apart(name, asked.folder / name)
        found = failures(read_report(asked.folder / name / REPORT))
        log.info("%s: %s", name, "; ".join(found) or "conforms")
    reports = [read_report(file) for file in sorted(asked.folder.glob(f"*/{REPORT}"))]
    PAGE.write_text(page(reports), encoding="utf-8")
    log.info("wrote %s with %d rows", PAGE, len(reports))
    return int(any(failures(report) for report in reports))


if __name__ == "__main__":
    sys.exit(main())
