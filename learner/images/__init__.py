"""Flow models on images of a data set."""
