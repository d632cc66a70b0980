"""Start of the `mobula` command and of its Ray workers, under a name that no project has.

A user's `deploy.py` may come first on the path, so our package `deploy` is loaded from beside this file. It sees to it
that the names of our other packages mean ours.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "deploy"


def protect() -> None:
    """Load our package `deploy`, unless it is loaded."""
    if "deploy" in sys.modules:
        return
    spec = spec_from_file_location("deploy", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)])
    assert spec is not None and spec.loader is not None, f"{FOLDER} is a package"
    sys.modules["deploy"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


def main() -> None:
    """Entry point of the `mobula` script."""
    protect()
    from mobula.deploy.cli import main as command

    command()
