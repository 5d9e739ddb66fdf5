"""Runs on several machines: the cluster file, the launcher and job files."""
