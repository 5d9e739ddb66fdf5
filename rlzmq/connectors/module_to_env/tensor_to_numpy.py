"""TensorToNumpy: from torch tensors to arrays."""

from __future__ import annotations

from typing import Any

from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.core.tree import tree_map

__all__ = ["TensorToNumpy"]


class TensorToNumpy(ConnectorV2):
    """Turns all tensors of the batch, at any depth, into numpy arrays (on the CPU, without gradients)."""

    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """See ConnectorV2."""
        return {name: tree_map(_to_numpy, data) for name, data in batch.items()}


def _to_numpy(leaf: Any) -> Any:
    return leaf.detach().cpu().numpy() if hasattr(leaf, "detach") else leaf
