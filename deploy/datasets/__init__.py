"""Data that a run writes itself, where a part of it comes from two packages."""
