"""Which data made a loss overflow: one more pass over what an update skipped, a batch at a time."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rlzmq.learners.gradients import global_norm

__all__ = ["find_unusable"]

_log = logging.getLogger("rlzmq.learners")


def find_unusable(learner: Any, batches: Sequence[Any]) -> list[int]:
    """Which of several batches of episodes, each taken alone, make a loss or its gradients not finite.

    The learner's rank does it alone, and nothing of it changes. None are found where no batch gives a finite loss:
    then it is the weights.

    Args:
        learner: A Learner, between two updates.
        batches: EpisodeBatches or MultiAgentEpisodeBatches.
    """
    group, learner.group = learner.group, None  # the other ranks do not wait for this
    modules = [module.unwrapped() for _, module in learner.module.items()]
    buffers = [buffer for m in modules if isinstance(m, nn.Module) for buffer in m.buffers()]
    before, metrics = [buffer.clone() for buffer in buffers], learner.metrics.get_state()
    try:
        with torch.random.fork_rng():
            unusable = [index for index, batch in enumerate(batches) if not _is_finite(learner, batch)]
    except Exception:  # the update itself went through: this only looks for what was wrong with it
        _log.warning("rank %d: what made the loss overflow is not known", learner.rank, exc_info=True)
        return []
    finally:
        learner.group = group
        learner.metrics.set_state(metrics)
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
    return unusable if len(unusable) < len(batches) else []


def _is_finite(learner: Any, batch: Any) -> bool:
    prepared = learner.prepare([batch]).on(learner.device)
    columns = {m: item for m, item in prepared.items() if m in learner.trained_module_ids}
    if not columns:
        return True
    losses = learner.compute_losses(fwd_out=learner.module.forward_train(columns), batch=columns)
    total: Any = sum(losses.values())
    if not math.isfinite(total.detach()) or not total.requires_grad:
        return math.isfinite(total.detach())
    parameters = [p for p in learner.module.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    return math.isfinite(float(global_norm([gradient for gradient in gradients if gradient is not None])))
