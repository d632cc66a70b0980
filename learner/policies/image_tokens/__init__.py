"""Models that draw a picture token by token."""
