"""Pages of HTML about runs: the report of one, the comparison of several."""
