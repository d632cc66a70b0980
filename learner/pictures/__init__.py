"""Flow models on pictures of a data set."""
