"""What Mobula is compared with: the same work without it."""
