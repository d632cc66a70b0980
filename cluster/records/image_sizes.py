"""Keys of a prompt's metadata under which reward functions find the sizes of its pictures."""

from __future__ import annotations

IMAGE_SIZES = "image_sizes"
"""[width, height] of each picture of the prompt: of its file, upright."""

SHOWN_SIZES = "shown_image_sizes"
"""[width, height] of each picture as the model's processor scaled it, for families that name places in these pixels."""
