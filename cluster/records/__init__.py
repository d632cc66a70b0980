"""What flows between roles: prompts, trajectories, media, and their Arrow form."""
