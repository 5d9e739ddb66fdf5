"""Basics for all layers: errors, seeds, metrics, checkpoints."""
