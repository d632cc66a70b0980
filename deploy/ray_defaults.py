"""What ray reads while it is imported: import this first. No token is needed, and nothing is reported to anybody."""

from __future__ import annotations

import os

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
