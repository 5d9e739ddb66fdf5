"""What every layer stands on: the error family, seeds, suggestions for mistyped names, metrics."""
