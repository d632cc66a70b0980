"""Storage of finished groups: replay buffer, journal and trajectory log."""
