"""Interfaces of the training service: many adapters on one frozen base."""
