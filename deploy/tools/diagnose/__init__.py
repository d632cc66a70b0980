"""`mobula diagnose`: why a run does not learn, as a list of checks with a number and a next action each."""
