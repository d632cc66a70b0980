"""Commands that explain a run: diagnose, audit."""
