"""Where a picture was taken: answers about places, their positions, and a reward that falls with distance."""
