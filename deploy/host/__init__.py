"""This machine: processes, terminal, the folder of a run and its Ray session."""
