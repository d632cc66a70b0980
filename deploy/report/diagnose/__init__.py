"""`mobula diagnose`."""

from __future__ import annotations
