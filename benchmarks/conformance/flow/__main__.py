"""Measure families of flow models and write docs/flow_models.md: `python -m benchmarks.conformance.flow [NAME ...]`.

Without names all tiny models are measured. Reports are kept in data/flow_conformance, and the page has all that lie
there.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.conformance.flow.measure import REPORT, read_report
from benchmarks.conformance.flow.table import failures, page
from mobula.learner.policies.flow.tiny import TINY_FLOW

PAGE = Path(__file__).parents[3] / "docs" / "flow_models.md"
TIMEOUT_S = 300  # of one model
MEASURED = [name for name in TINY_FLOW if name not in ("sd3_glyphs", "flux-kontext-letters")]  # of measured families

log = logging.getLogger(__name__)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TINY_FLOW))
    parser.add_argument("--folder", type=Path, default=Path("data/flow_conformance"))
    parser.add_argument("--page-only", action="store_true", help="measure nothing")
    args = parser.parse_args()
    names = [] if args.page_only else args.names or list(MEASURED)
    unknown = [name for name in names if name not in TINY_FLOW]
    if unknown:
        parser.error(f"there is no tiny model {unknown[0]}: choose {', '.join(TINY_FLOW)}")
    for name in names:
        shutil.rmtree(args.folder / name, ignore_errors=True)
    if names:
        command = [sys.executable, "-m", "benchmarks.conformance.flow.measure", str(args.folder), *names]
        subprocess.run(command, timeout=TIMEOUT_S * len(names), check=True)
    reports = [read_report(file) for file in sorted(args.folder.glob(f"*/{REPORT}"))]
    for report in reports:
        log.info("%s: %s", report.name, "; ".join(failures(report)) or "conforms")
    PAGE.write_text(page(reports), encoding="utf-8")
    log.info("wrote %s with %d rows", PAGE, len(reports))
    return int(any(failures(report) for report in reports))


if __name__ == "__main__":
    sys.exit(main())
