"""Guard against reward hacking: signs, their statistics, and the actions of a run."""
