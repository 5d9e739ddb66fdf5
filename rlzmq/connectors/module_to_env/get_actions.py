"""GetActions: samples actions from the module's outputs, or takes the greedy ones."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

from rlzmq.connectors.common.layout import to_tensor
from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.rl_modules import is_multi_rl_module
from rlzmq.connectors.torch_piece import Batch, Memory, TorchPiece
from rlzmq.core.tree import tree_map
from rlzmq.episodes.columns import Columns

__all__ = ["GetActions", "draw_actions", "given_actions_logp"]


class GetActions(ConnectorV2):
    """Adds ``actions`` and ``action_logp`` if the module returned only ``action_dist_inputs``.

    With ``explore=True``, actions are sampled from the module's exploration distribution. Otherwise they are the most
    likely actions of its inference distribution. Random numbers come from the torch.Generator in
    ``shared_data["generator"]``, or from torch's global stream without one. Rows are sampled in order.

    Actions that the module returned itself are used unchanged. While exploring, they get their ``action_logp`` if the
    module also returned ``action_dist_inputs``.
    """

    stage: ClassVar[int] = 1

    def __call__(
        self,
        *,
        rl_module: Any,
        batch: dict[str, Any],
        explore: bool | None = None,
        shared_data: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> dict[str, Any]:
        """See ConnectorV2.

        Raises:
            ValueError: A module returned neither ``actions`` nor ``action_dist_inputs``.
        """
        generator = (shared_data or {}).get("generator")
        if is_multi_rl_module(rl_module):
            for module_id, outputs in batch.items():
                _add_actions(outputs, rl_module[module_id], explore, generator, f"module {module_id!r}")
        else:
            _add_actions(batch, rl_module, explore, generator, type(rl_module).__name__)
        return batch

    def to_torch(self, *, rl_module: Any, agent_id: Hashable) -> TorchPiece:
        """See ConnectorV2. Without exploration, the actions are the most likely ones."""

        def forward(batch: Batch, memory: Memory) -> tuple[Batch, Memory]:
            return _with_actions(rl_module, batch, False, None), memory

        def forward_exploration(batch: Batch, memory: Memory, generator: Any) -> tuple[Batch, Memory]:
            return _with_actions(rl_module, batch, True, generator), memory

        return TorchPiece(forward=forward, forward_exploration=forward_exploration)


def _with_actions(module: object, batch: Batch, explore: bool, generator: object) -> Batch:
    batch = dict(batch)
    _add_actions(batch, module, explore, generator, type(module).__name__, wants_logp=False)
    return batch


def _add_actions(
    outputs: dict[str, Any],
    module: Any,
    explore: bool | None,
    generator: Any,
    where: str,
    *,
    wants_logp: bool = True,
) -> None:
    inputs = outputs.get(Columns.ACTION_DIST_INPUTS)
    if Columns.ACTIONS in outputs:
        if explore and inputs is not None and Columns.ACTION_LOGP not in outputs:
            distribution = module.get_exploration_action_dist_cls().from_logits(inputs)
            outputs |= given_actions_logp(distribution, outputs[Columns.ACTIONS])
        return
    if inputs is None:
        raise ValueError(
            f"{where}: expected the outputs to have {Columns.ACTIONS!r} or {Columns.ACTION_DIST_INPUTS!r}, "
            f"got {sorted(outputs)}. Return one of them from "
            f"_forward_{'exploration' if explore else 'inference'}()."
        )
    dist_cls = module.get_exploration_action_dist_cls() if explore else module.get_inference_action_dist_cls()
    actions, logp = draw_actions(
        dist_cls.from_logits(inputs),
        explore,
        generator,
        wants_logp=wants_logp and Columns.ACTION_LOGP not in outputs,
    )
    outputs[Columns.ACTIONS] = actions
    if logp is not None:
        outputs[Columns.ACTION_LOGP] = logp


def given_actions_logp(distribution: Any, actions: Any) -> dict[str, Any]:
    """Return the column ``action_logp`` for actions that a module chose itself.

    Args:
        distribution: Distribution of the ``action_dist_inputs`` that the module returned with them.
        actions: Tree of tensors (or arrays) ``[B, ...]``.

    Returns:
        ``{"action_logp": float tensor [B]}``; ``{}`` if a deterministic distribution has none.
    """
    if not getattr(distribution, "has_logp", True):
        return {}
    return {Columns.ACTION_LOGP: distribution.logp(tree_map(to_tensor, actions))}


def draw_actions(
    distribution: Any, explore: bool | None, generator: Any, *, wants_logp: bool = True
) -> tuple[Any, Any]:
    """Return actions drawn from a distribution, and their log-probabilities.

    Args:
        distribution: The module's action distribution.
        explore: Whether to sample; otherwise take the most likely actions.
        generator: torch.Generator for sampling, or None.
        wants_logp: Whether to compute log-probabilities.

    Returns:
        (actions, log-probabilities). The latter are None if not requested, or if a deterministic distribution has none.
    """
    has_logp = wants_logp and getattr(distribution, "has_logp", True)
    if not explore:
        actions = distribution.to_deterministic().sample(generator=generator)
        return actions, distribution.logp(actions) if has_logp else None
    if has_logp:
        actions, logp = distribution.sample_and_logp(generator=generator)
        return actions, logp
    return distribution.sample(generator=generator), None
