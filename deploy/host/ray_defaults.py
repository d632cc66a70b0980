"""Settings that Ray reads while it is imported: import this first. No token is required, and usage statistics are off.

127.0.0.1 means 127.0.0.1: Ray would put an address that other machines reach in its place, and listen there.
"""

from __future__ import annotations

import os

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from ray._private import services

services.resolve_ip_for_localhost = lambda host: host
