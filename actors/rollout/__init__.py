"""The rollout actor, the client in the driver, and the messages between the two."""
