"""The report of a run: data, charts and page."""
