"""Deployment of trained policies: exported files and policy servers."""
