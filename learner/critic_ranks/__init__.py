"""A critic on separate ranks: its worker, the rank group, and the learner group that trains with it."""
