"""Advantage estimation as learners use it; its arithmetic lies beside the connector piece."""

from __future__ import annotations

from rlzmq.connectors.learner.gae import compute_gae, discounted_suffix_sums, standardize

__all__ = ["compute_gae", "discounted_suffix_sums", "standardize"]
