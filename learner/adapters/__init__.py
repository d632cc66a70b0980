"""Many adapters of several users on one frozen base model."""
