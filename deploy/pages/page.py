"""Pages of HTML: written numbers and the frame."""

from __future__ import annotations

import base64
import hashlib
import math
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup


def write_number(value: float) -> str:
    """Formats a number with about three significant digits: 0.0312, 1.25, 12.5, 1,250, 3.1e-7."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e7:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    if size >= 100:
        return f"{value:,.0f}"
    digits = 1 if size >= 10 else 2 if size >= 1 else 3 if size >= 0.1 else 4
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".")


def write_bytes(value: float) -> str:
    """Formats a size in binary units: 3.2 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{write_number(value)} {unit}"
        value /= 1024
    return f"{write_number(value)} TiB"


def write_duration(seconds: float) -> str:
    """Formats a duration: 4.2 s, 3 min 05 s, 2 h 10 min."""
    if not math.isfinite(seconds) or seconds < 60:
        return f"{write_number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


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
