"""The driver's side of a run: groups of processes, their supervision, pipelines, and results."""
