"""Checks of a machine with GPUs, stage by stage."""

from __future__ import annotations
