"""Examples of a warm start as a learner's ranks take them."""

from __future__ import annotations

from collections.abc import Sequence

from mobula.learner.examples import Outlined, StoredExample, stored_examples


def at_hand(examples: Sequence[Outlined]) -> list[StoredExample]:
    """The examples by value."""
    return stored_examples(examples, lambda example: example)
