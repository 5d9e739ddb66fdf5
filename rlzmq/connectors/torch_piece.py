"""TorchPiece: a connector piece as operations on tensors, for exported or served policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

__all__ = ["Batch", "Memory", "TorchPiece"]

Batch: TypeAlias = dict[str, Any]
"""Column -> tree of tensors ``[B, ...]``."""

Memory: TypeAlias = Mapping[str, Any]
"""Name -> tree of tensors ``[B, ...]``."""


def _unchanged(batch: Batch, memory: Memory) -> tuple[Batch, Memory]:
    return batch, memory


def _kept(batch: Batch, memory: Memory) -> Memory:
    return memory


@dataclass(frozen=True, kw_only=True)
class TorchPiece:
    """A connector piece as functions on a batch of rows, each of a different episode, without statistics to learn.

    The functions use torch operations that `torch.export` can trace. The number of rows B may differ from call to call.
    They return new dicts and tensors and do not modify their arguments. A piece that only changes the layout of data
    (e.g. from arrays to tensors) is ``TorchPiece()``.

    Example::

        class Negate(SingleAgentObservationPreprocessor):
            def preprocess(self, observation, episode):
                return -observation

            def to_torch(self, *, rl_module, agent_id):
                return TorchPiece(forward=lambda batch, memory: ({**batch, "obs": -batch["obs"]}, memory))

    Attributes:
        forward: ``(batch, memory) -> (batch, memory)``. In env-to-module pipelines the batch has ``obs`` (and
            ``rewards``, see below); in module-to-env pipelines it has the module's outputs.
        initial_memory: The piece's memory at the beginning of an episode: name -> tree of arrays without batch axis.
            Its keys name the inputs and outputs of the exported file.
        remember: ``(batch, memory) -> memory``, called once the actions are known, with ``batch["actions"]``.
        reads_rewards: Whether ``batch["rewards"]`` is needed: float32 ``[B]``, the reward of each row's
            previous action, 0 at the beginning of an episode.
        forward_exploration: ``(batch, memory, generator) -> (batch, memory)``, replaces `forward` while the policy
            explores; None: `forward` is used. Exported files do not explore.
    """

    forward: Callable[[Batch, Memory], tuple[Batch, Memory]] = _unchanged
    initial_memory: Memory = field(default_factory=dict)
    remember: Callable[[Batch, Memory], Memory] = _kept
    reads_rewards: bool = False
    forward_exploration: Callable[[Batch, Memory, Any], tuple[Batch, Memory]] | None = None
