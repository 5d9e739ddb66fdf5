"""Sampling from multi-agent environments."""
