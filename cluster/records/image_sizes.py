"""Metadata keys of a prompt for the sizes of its images, for reward functions."""

from __future__ import annotations

IMAGE_SIZES = "image_sizes"
"""[width, height] of each image file of the prompt, upright."""

SHOWN_SIZES = "shown_image_sizes"
"""[width, height] of each image after the model's processor, for families that output coordinates in these pixels."""
