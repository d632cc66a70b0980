"""Geolocation of an image: answers about places, positions of names, and a reward that decreases with distance."""
