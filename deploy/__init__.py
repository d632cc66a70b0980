"""The only wiring of a run. Imported first of all: the names of our packages mean ours, here and in child processes."""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

OWN = ("actors", "cluster", "configs", "deploy", "learner", "rewards")
ROOT = Path(__file__).resolve().parent.parent


class OwnFirst:
    """Finds our packages beside this one, wherever the path leads: Ray puts the working folder first on the path of a
    worker when its first task comes.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(ROOT)]) if name in OWN else None


def _clashing() -> list[str]:
    """Files and folders of others that an import of our packages would find: on the PYTHONPATH, or in the working
    folder, which Ray puts on the path of its workers.
    """
    path = [os.path.abspath(os.curdir), *sys.path] if os.path.isdir(os.curdir) else sys.path
    specs = [PathFinder.find_spec(name, path) for name in OWN]
    found = [spec.origin or next(iter(spec.submodule_search_locations or ())) for spec in specs if spec is not None]
    return [place for place in found if not Path(place).resolve().is_relative_to(ROOT)]


CLASHING = tuple(_clashing())
sys.meta_path.insert(0, OwnFirst)
if CLASHING:
    sys.path.insert(0, str(ROOT))
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for children; Ray's workers run `mobula_start.protect` too
