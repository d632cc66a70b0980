"""Examples of a warm start as a learner's ranks take them."""

from __future__ import annotations

from collections.abc import Sequence

from mobula.learner.examples import SharedExample, StoredExample, stored_examples


def at_hand(examples: Sequence[SharedExample]) -> list[StoredExample]:
    """The examples by value."""
    return stored_examples(examples, lambda example: example)
