"""Geolocation of a picture: answers about places, their positions, and a reward that falls with distance."""
