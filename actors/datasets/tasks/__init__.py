"""Small datasets that a run writes itself."""
