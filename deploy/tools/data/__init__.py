"""Commands on data sets."""
