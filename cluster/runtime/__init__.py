"""The layer below the roles: Ray actors, object store, placement, network and concurrency."""
