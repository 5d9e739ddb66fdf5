"""ReplayLearner: base class of learners that draw from a replay buffer (DQN, SAC)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlzmq.config.base_config import BaseConfig
from rlzmq.connectors.rl_modules import initial_state, max_seq_len
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.update_plan import UpdatePlan
from rlzmq.episodes.columns import Columns
from rlzmq.learners.replay_source import REPLAY_KEY, BurnIn, EpisodeReplay
from rlzmq.learners.sources import BatchSource
from rlzmq.learners.target_network_learner import TargetNetworkLearner
from rlzmq.replay import EpisodeReplayBuffer, MultiAgentEpisodeReplayBuffer, ReplayBuffer

__all__ = ["ReplayLearner", "importance_weights"]


# Share of the largest TD error in a sequence's priority, as in R2D2.
_ETA = 0.9


class _ReplaySettings(Protocol):
    """The config settings that ReplayLearner reads."""

    gamma: float
    n_step: int | tuple[int, int]
    train_batch_size_per_learner: int

    @property
    def is_multi_agent(self) -> bool: ...

    @property
    def replay_buffer_config(self) -> dict[str, Any]: ...

    @property
    def replay_buffer_class(self) -> type[ReplayBuffer]: ...

    def update_plan(self) -> UpdatePlan: ...


class ReplayLearner(TargetNetworkLearner):
    """Base class of learners whose batches are drawn from a replay buffer.

    After each minibatch's step, the TD errors of its rows become their priorities. Subclasses call `note_td_errors` in
    their loss.

    Columns of a train batch: ``obs``, ``actions``, ``rewards`` (sums of ``n_step`` rewards), ``new_obs``,
    ``terminateds``, ``truncateds``, ``n_step`` (int64), ``weights`` (float32), ``replay_key`` (int64). Stateful modules
    get sequences ``[B, T, …]`` with ``state_in`` ``[B, …]`` and ``loss_mask``, which is False in the padding and in the
    burn-in; ``rewards`` are those of single steps, and with priorities there are ``weights`` and ``priority_key``.
    """

    trains_sequences: ClassVar[bool] = False
    """Whether the loss supports the sequences of stateful modules."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._td_errors: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def _replay_settings(self) -> _ReplaySettings:
        return cast(_ReplaySettings, self.config)

    def build(self) -> None:
        """Build the modules. For stateful ones, the buffer stores states and returns sequences.

        Raises:
            ConfigurationError: A module is stateful, and the settings or this learner do not support that; or there
                is a burn-in without a stateful module.
        """
        if self.module is not None:
            return
        super().build()
        burn_in_len = self._burn_in_len
        if self._burn_ins():
            self.source: BatchSource = self.make_source()
        elif burn_in_len:
            raise ConfigurationError(
                f"config.burn_in_len={burn_in_len}: no module has a state to warm up. Leave it at 0, or set "
                "model_config['use_lstm']."
            )

    @property
    def _burn_in_len(self) -> int:
        return int(self._setting("burn_in_len", 0))

    def _burn_ins(self) -> dict[str, BurnIn]:
        """Return the burn-in of each stateful module; {} before `build`."""
        modules = {} if self.module is None else {mid: self.module[mid].unwrapped() for mid in self.module}
        return {
            module_id: BurnIn(
                self._burn_in_len, initial_state(module), max_seq_len(module) - self._burn_in_len
            )
            for module_id, module in modules.items()
            if module.is_stateful()
        }

    def _on_modules_changed(self) -> None:
        super()._on_modules_changed()
        if isinstance(self.source, EpisodeReplay):
            self.source.burn_ins = self._burn_ins()
            if isinstance(self.source.buffer, MultiAgentEpisodeReplayBuffer):
                self.source.buffer.keeps_extra_model_outputs = self.source.burn_ins.keys()

    @classmethod
    def check_module(cls, module_id: str, module: Any, config: BaseConfig) -> None:
        """Check a module, like Learner. A stateful module must be trainable on sequences from the buffer."""
        super().check_module(module_id, module, config)
        if not module.is_stateful():
            return
        settings = cast(_ReplaySettings, config)
        where, plan, burn_in_len = (
            module.describe(),
            settings.update_plan(),
            int(config.get("burn_in_len", 0)),
        )
        if not cls.trains_sequences:
            raise ConfigurationError(
                f"{where} is stateful, which {cls.__name__} does not train. Use DQN or PPO, or stack frames "
                "(FrameStackingEnvToModule and FrameStackingLearner)."
            )
        kind = settings.replay_buffer_class
        if not kind.draws_sequences:
            raise ConfigurationError(
                f"{where} is stateful, config.replay_buffer_config['type']={kind.__name__!r}: it draws "
                "transitions, but a stateful module is trained on sequences. Use 'EpisodeReplayBuffer' or "
                "'PrioritizedEpisodeReplayBuffer'."
            )
        longest = max_seq_len(module)
        if longest - burn_in_len < 2:
            raise ConfigurationError(
                f"{where} is stateful, config.burn_in_len={burn_in_len}: its model_config has "
                f"max_seq_len={longest}, and a sequence trains at least two steps after the burn-in. Lower burn_in_len "
                "to at most max_seq_len - 2, or raise max_seq_len."
            )
        capacity = settings.replay_buffer_config["capacity"]
        if longest > capacity // plan.num_ranks // 4:
            # Stretches of episodes have at most a quarter of a rank's capacity.
            raise ConfigurationError(
                f"{where} is stateful, config.replay_buffer_config['capacity']={capacity}: its model_config has "
                f"max_seq_len={longest}, and a sequence may span a quarter of a learner's buffer. Raise the capacity "
                f"to {4 * longest * plan.num_ranks} or more, or lower max_seq_len."
            )
        if plan.num_ranks > 1 and not plan.keeps_episodes:
            raise ConfigurationError(
                f"{where} is stateful: with {plan.num_ranks} learners each must get whole episodes. Set "
                f"config.rl_module(model_config={{'max_seq_len': {longest}}}) for the run to do so."
            )

    def make_source(self) -> BatchSource:
        """Return this rank's replay buffer. The ranks share the capacity equally."""
        settings = self._replay_settings
        plan, given, burn_ins = settings.update_plan(), settings.replay_buffer_config, self._burn_ins()
        kind = settings.replay_buffer_class
        arguments = {name: given[name] for name in kind.settings() if name in given}
        arguments["capacity"] = -(-given["capacity"] // plan.num_ranks)
        if issubclass(kind, EpisodeReplayBuffer | MultiAgentEpisodeReplayBuffer):
            keeps = burn_ins.keys() if settings.is_multi_agent else bool(burn_ins)
            arguments["keeps_extra_model_outputs"] = keeps
        options: dict[str, Any] = {"n_step": settings.n_step, "gamma": settings.gamma}
        if kind.uses_priorities:
            options["beta"] = given["beta"]
        buffer = kind.from_config(self.config, **arguments)
        source = EpisodeReplay.of_plan(
            plan, buffer, batch_size=settings.train_batch_size_per_learner, **options
        )
        source.burn_ins = burn_ins
        return source

    def drawn_n(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the n of each sequence's sums of rewards, int64 [B]."""
        n, rewards = self._replay_settings.n_step, batch[Columns.REWARDS]
        least, most = (n, n) if isinstance(n, int) else n
        if least == most:
            return torch.full(rewards.shape[:1], least, device=rewards.device)
        return torch.randint(least, most + 1, rewards.shape[:1], device=rewards.device)

    def note_td_errors(self, module_id: str, batch: Mapping[str, Any], td_errors_B: Tensor) -> None:
        """Set the TD errors of a module's rows, float [B], which become priorities if the minibatch's step is taken.

        Of sequences, they are those of the trained steps, in the order of ``loss_mask``.
        """
        keys_B, td_errors_B = (
            batch.get(REPLAY_KEY),
            td_errors_B.detach(),
        )  # absent in batches made by the user
        if (mask := batch.get(Columns.LOSS_MASK)) is not None:
            keys_B = batch.get("priority_key")  # absent if sequences are drawn uniformly
            if keys_B is not None:
                keys_B = keys_B[:, 0]
                td_errors_B = sequence_priorities(td_errors_B, mask)
        if keys_B is not None:
            self._td_errors[module_id] = keys_B, td_errors_B

    def before_gradient_based_update(self, *, timesteps: Mapping[str, Any]) -> None:
        super().before_gradient_based_update(timesteps=timesteps)
        self._td_errors = {}

    def apply_gradients(self, gradients_dict: dict[Tensor, Tensor]) -> None:
        """Step the optimizers, then update target networks and priorities."""
        super().apply_gradients(gradients_dict)
        noted, self._td_errors = self._td_errors, {}
        for module_id, (keys_B, td_errors_B) in noted.items():
            keys: NDArray[np.int64] = keys_B.cpu().numpy()
            td_errors: NDArray[np.float32] = td_errors_B.cpu().numpy()
            is_finite = np.isfinite(td_errors)
            self.source.update_priorities(module_id, td_errors[is_finite], keys[is_finite])


def with_n_step_sums(batch: Mapping[str, Any], n_B: Tensor, gamma: float) -> tuple[dict[str, Any], Tensor]:
    """Return a batch of sequences with sums of rewards, and the index of the last step in each sum, int64 [B, T].

    The sum of step t is Σ_{k<n} γ^k r_{t+k}. It ends with the sequence, so that ``n_step`` may be smaller than n.

    Args:
        batch: The batch: ``rewards``, ``terminateds``, ``truncateds``, [B, T], and ``seq_lens`` [B], by default T.
        n_B: Numbers of rewards in a sum, int64 [B].
        gamma: γ.
    """
    rewards_BT = batch[Columns.REWARDS].float()
    num_steps = rewards_BT.shape[1]
    steps_T = torch.arange(num_steps, device=rewards_BT.device)
    lengths_B = batch.get(Columns.SEQ_LENS, torch.full_like(n_B, num_steps))
    left_BT = (lengths_B[:, None] - steps_T).clamp(min=1)
    counts_BT = torch.minimum(n_B[:, None], left_BT)
    sums_BT = rewards_BT
    for k in range(1, int(counts_BT.max())):
        later_BT = torch.nn.functional.pad(rewards_BT[:, k:], (0, k))
        sums_BT = sums_BT + gamma**k * later_BT * (counts_BT > k)
    ends_BT = (steps_T + counts_BT - 1).clamp(max=num_steps - 1)
    flags = {name: batch[name].gather(1, ends_BT) for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS)}
    return {**batch, Columns.REWARDS: sums_BT, "n_step": counts_BT, **flags}, ends_BT


def sequence_priorities(td_errors_N: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the priorities of sequences, η max |δ| + (1 - η) mean |δ| (R2D2), float [B].

    Args:
        td_errors_N: TD errors of the trained steps.
        mask_BT: Which steps these are; at least one of each sequence.
    """
    errors_BT = torch.zeros(mask_BT.shape, device=td_errors_N.device).masked_scatter(
        mask_BT, td_errors_N.abs()
    )
    means_B = errors_BT.sum(1) / mask_BT.sum(1)
    return _ETA * errors_BT.amax(1) + (1.0 - _ETA) * means_B


def importance_weights(batch: Mapping[str, Any]) -> Tensor:
    """Return the column ``weights``, float [B]; all 1 if it is missing."""
    weights: Tensor | None = batch.get("weights")
    return torch.ones_like(batch[Columns.REWARDS], dtype=torch.float32) if weights is None else weights
