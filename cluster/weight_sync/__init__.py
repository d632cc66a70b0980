"""Weight sync from the learner to the rollout actors: manifest, packed buckets, transports, the push."""
