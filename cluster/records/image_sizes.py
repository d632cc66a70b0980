"""Metadata keys of a prompt under which reward functions find image sizes."""

from __future__ import annotations

IMAGE_SIZES = "image_sizes"
"""[width, height] of each image file of the prompt, upright."""

SHOWN_SIZES = "shown_image_sizes"
"""[width, height] of each image after the model's processor, for model families with coordinates in these pixels."""
