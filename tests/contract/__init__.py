"""What every rollout engine and every transport must do alike; a package, so that its engines end with its tests."""
