"""From prompts to finished groups: dispatch, admission, in-flight requests and the rollout pool."""
