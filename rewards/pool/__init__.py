"""The reward pool: services, workers, and responses that are scored ahead of their group."""
