"""Optimizers by name, and the learning-rate schedule."""

from mobula.learner.optim.optimizers import OPTIMIZERS, build_optimizer, learning_rate, optimizer_maker

__all__ = ["OPTIMIZERS", "build_optimizer", "learning_rate", "optimizer_maker"]
