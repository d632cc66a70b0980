"""`mobula gpu-check`: a staged check of a GPU machine, with or without this project's environment."""
