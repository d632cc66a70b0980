"""Build hook: puts the `mobula` package itself into wheels. An editable install finds it by its `.pth` file."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PackageHook(BuildHookInterface):  # type: ignore[misc]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            build_data["force_include"]["deploy/package/mobula/__init__.py"] = "__init__.py"  # below `sources`
