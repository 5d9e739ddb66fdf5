"""Trained policies in use: exported files, and servers."""
