"""Sampling from vector environments with one agent each."""
