"""NextStep-1 and 1.1: an autoregressive image model with continuous tokens, in the layout of its released files."""
