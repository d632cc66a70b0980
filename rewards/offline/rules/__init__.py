"""The rules that score a record offline."""
