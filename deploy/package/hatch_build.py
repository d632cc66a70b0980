"""Build hook: puts the `mobula` package itself into wheels. An editable install finds it by its `.pth` file."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PackageHook(BuildHookInterface):  # type: ignore[misc]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            for name in ("__init__.py", "py.typed"):  # below `sources`
                build_data["force_include"][f"deploy/package/mobula/{name}"] = name
