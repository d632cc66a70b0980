"""Ordered execution of the requests of many models on one learner."""
