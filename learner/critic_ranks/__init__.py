"""A critic on ranks of its own: its worker, the group of them, and the learner that trains beside it."""
