"""One script a performance claim: each measures a ratio in one run; the figures that count are kept in `baselines/`."""
