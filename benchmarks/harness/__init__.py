"""How a claim is measured and reported."""
