"""The only wiring of a run. Imported first of all: the names of our packages mean ours, here and in child processes."""

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

OWN = ("actors", "cluster", "configs", "deploy", "learner", "rewards")
ROOT = Path(__file__).resolve().parent.parent


def _clashing() -> list[str]:
    """Files and folders of others that an import of our packages would find: on the PYTHONPATH, or in the working
    folder, which Ray puts on the path of its workers.
    """
    path = [os.path.abspath(os.curdir), *sys.path] if os.path.isdir(os.curdir) else sys.path
    specs = [PathFinder.find_spec(name, path) for name in OWN]
    found = [spec.origin or next(iter(spec.submodule_search_locations or ())) for spec in specs if spec is not None]
    return [place for place in found if not Path(place).resolve().is_relative_to(ROOT)]


CLASHING = tuple(_clashing())
if CLASHING:
    sys.path.insert(0, str(ROOT))
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for children; Ray's workers run `mobula_start.protect` too
