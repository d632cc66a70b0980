"""Renders offline HTML pages from templates with escaped data, a style sheet, and one script, allowed by its hash."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from mobula.cluster.metrics.report.written_numbers import write_bytes, write_duration, write_number

ASSETS = Path(__file__).parent
STYLE = ASSETS / "report.css"


def environment(folder: Path) -> Environment:
    """Returns the template environment of `folder`; an undefined name in a template is an error."""
    templates = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(number=write_number, duration=write_duration, bytes=write_bytes)
    return templates


def render(template: str, **values: Any) -> str:
    """Renders a template of this folder with style and script. The browser may run no other script."""
    style, script = (
        "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in names)
        for names in (("uplot.min.css", "report.css"), ("uplot.min.js", "report.js"))
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template_values = {"style": Markup(style), "script": Markup(script), "script_hash": f"sha256-{digest}"}
    return environment(ASSETS).get_template(template).render(**values, **template_values)
