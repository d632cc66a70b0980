"""The rollout actor, its client in the driver, and the messages between them."""
