"""The reward pool: services, workers, and responses that are scored before their group is complete."""
