"""Models that draw an image token by token."""
