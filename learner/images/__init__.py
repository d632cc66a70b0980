"""Supervised training of flow models on images of a dataset."""
