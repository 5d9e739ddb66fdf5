"""Connector pieces and pipelines: from episodes to module batches, and from module outputs to the env."""
