"""The report of a run: its data, its charts and the page."""
