"""Geolocation of an image: answers about places, their positions, and a reward that falls with distance."""
