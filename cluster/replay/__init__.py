"""Finished groups and the record of them: replay buffer, journal and trajectory log."""
