"""The output of `mobula doctor --leftovers`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from mobula.deploy.tools import leftovers

FREE_WITHIN_S = 10.0  # a leftover that does not heed SIGTERM is killed then


def show_leftovers(ids: Sequence[str], address: str | None, console: Console) -> int:
    """End the leftovers of these ids, or list all of them; returns how many could not be ended."""
    num_left = 0
    dead = leftovers.find_leftovers(address=address)
    if not ids:
        for leftover in dead:
            console.print(leftover.id, style="bold", end="  ")
            console.print(f"run {leftover.run}: {leftover.what}", markup=False, highlight=False)
        console.print("End one with --free ID." if dead else "Dead runs left nothing on this machine.")
    for leftover, refusal in leftovers.free(ids, dead, FREE_WITHIN_S):
        num_left += bool(refusal)
        console.print(f"{leftover.id}: {refusal or 'freed'}", markup=False, highlight=False)
    return num_left
