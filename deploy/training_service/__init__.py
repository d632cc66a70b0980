"""The training service: the wire protocol of the `tinker` client in front of a learner and engines."""
