"""What a run measures, where the numbers go, and the report that is made from them."""
