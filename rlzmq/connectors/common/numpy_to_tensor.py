"""NumpyToTensor: converts arrays to torch tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.torch_piece import Batch, Memory, TorchPiece
from rlzmq.core.tree import tree_map
from rlzmq.episodes.columns import Columns

__all__ = ["NumpyToTensor", "to_tensor"]


class NumpyToTensor(ConnectorV2):
    """Converts all arrays of the batch, at any depth, to tensors. Infos remain lists.

    float64 becomes float32; other dtypes are unchanged.

    Args:
        input_observation_space, input_action_space: See ConnectorV2.
        as_learner_connector: Whether the piece builds train batches, which may contain only numbers.
        pin_memory: Whether to put CPU tensors into pinned memory.
        device: Torch device; None: CPU.
    """

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        as_learner_connector: bool = False,
        pin_memory: bool = False,
        device: Any = None,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.as_learner_connector = as_learner_connector
        self.pin_memory = pin_memory
        self.device = device

    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """See ConnectorV2.

        Raises:
            ValueError: A learner's batch has strings or Python objects in a column.
        """
        return {name: self._convert(name, data) for name, data in batch.items()}

    def _convert(self, name: str, data: Any) -> Any:
        if name == Columns.INFOS:
            return data
        if isinstance(data, dict):
            return {key: self._convert(key, part) for key, part in data.items()}

        def convert(leaf: Any) -> Any:
            tensor = to_tensor(leaf, self.device, pin_memory=self.pin_memory)
            if self.as_learner_connector and isinstance(tensor, np.ndarray) and tensor.size:
                raise ValueError(
                    f"column {name!r}: expected numbers to learn from, got {type(tensor.flat[0]).__name__} "
                    f"{tensor.flat[0]!r:.80}. Turn it into numbers, or leave it out, in a learner connector piece."
                )
            return tensor

        return tree_map(convert, data)

    def to_torch(self, *, rl_module: Any, agent_id: Any) -> TorchPiece:
        """See ConnectorV2. float64 becomes float32."""
        import torch

        def single(leaf: Any) -> Any:
            return leaf.to(torch.float32) if leaf.dtype is torch.float64 else leaf

        def forward(batch: Batch, memory: Memory) -> tuple[Batch, Memory]:
            return {name: tree_map(single, column) for name, column in batch.items()}, memory

        return TorchPiece(forward=forward)


def to_tensor(leaf: Any, device: Any = None, *, pin_memory: bool = False) -> Any:
    """Convert an array to a tensor (sharing memory if possible); return anything else unchanged."""
    import torch

    if isinstance(leaf, (np.ndarray, np.generic)):
        array = leaf if type(leaf) is np.ndarray else np.asarray(leaf).view(np.ndarray)
        if array.dtype.kind not in "biufc":
            return leaf
        flags = array.flags
        if not flags.carray and (not flags.writeable or min(array.strides) < 0):
            array = array.copy()
        tensor = torch.from_numpy(array)
        if tensor.dtype is torch.float64:
            # Numbers that are too large become infinity, which the learner notices in the loss.
            tensor = tensor.float()
    elif isinstance(leaf, torch.Tensor):
        tensor = leaf
    else:
        return leaf
    if pin_memory and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor if device is None else tensor.to(device)
