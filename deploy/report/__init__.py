"""Commands that explain a run: compare, diagnose, audit."""
