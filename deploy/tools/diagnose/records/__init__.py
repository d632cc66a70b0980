"""What checks read and return: material of a run, data survey, trends, and how checks are run."""
