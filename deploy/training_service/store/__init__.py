"""Durable records of the service: sessions, models, requests, checkpoints and samplers in one SQLite file."""
