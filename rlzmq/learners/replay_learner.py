"""ReplayLearner: base class of learners that draw from a replay buffer (DQN, SAC, TQC, TD3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from rlzmq.config.base_config import BaseConfig
from rlzmq.connectors.common.agent_to_module_mapping import initial_state, max_seq_len
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.tree import as_numpy, tree_map
from rlzmq.core.update_plan import ReplayRatio, Schedule, UpdatePlan
from rlzmq.episodes.batch_columns import ragged_arange
from rlzmq.episodes.columns import DEFAULT_MODULE_ID, Columns
from rlzmq.episodes.episode_batch import EpisodeBatch, num_env_steps_of
from rlzmq.learners.batches import BatchSource, batches_of
from rlzmq.learners.target_network_learner import TargetNetworkLearner
from rlzmq.modules.weights import is_trainable
from rlzmq.replay import EpisodeReplayBuffer, ReplayBuffer, joined

__all__ = ["BurnIn", "EpisodeReplay", "ReplayLearner", "importance_weights"]


REPLAY_KEY = "replay_key"
"""Column of sampled batches, int64: identifies the first step of a row."""


@dataclass(frozen=True)
class BurnIn:
    """The burn-in before the drawn steps of a stateful module's sequences.

    Args:
        num_steps: Number of steps before the drawn ones that warm up the state, as far as they are stored.
        initial_state: The module's state in new episodes, a tree of arrays.
        num_drawn: Maximum number of steps drawn for a sequence.
        lookback: Number of steps before these that connector pieces need, at least one, which has the state.
    """

    num_steps: int
    initial_state: Any
    num_drawn: int
    lookback: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `EpisodeReplayBuffer.sample`. They include the ``state_out`` of the step before the burn-in."""
        return {
            "n_step": None,  # the loss sums the rewards of a sequence
            "full_length": True,
            "batch_length_T": self.num_drawn,
            "lookback": self.num_steps + self.lookback,
            "include_extra_model_outputs": True,
        }

    def extend(self, batch: EpisodeBatch, state_before: Callable[[int], Any]) -> None:
        """Extend a sample's sequences to the burn-in, where ``loss_mask`` is False, and set their initial states.

        The initial state is the ``state_out`` of the step before, or what the buffer knows of it if that step is not
        stored. At the beginning of an episode, and in data that was recorded without states, it is that of a new
        episode.

        Args:
            batch: The sample.
            state_before: See `EpisodeReplayBuffer.state_before`.
        """
        num_before = np.minimum(batch.lookback, self.num_steps)
        for name, change in (
            ("start", -num_before),
            ("length", num_before),
            ("lookback", -num_before),
            ("t_started", -num_before),
        ):
            setattr(batch, name, getattr(batch, name) + change)
        mask = np.ones(len(batch.columns[REPLAY_KEY]), np.bool_)
        mask[ragged_arange(batch.start, num_before)] = False
        batch.columns[Columns.LOSS_MASK] = mask
        is_known, before = batch.lookback > 0, np.maximum(batch.start - 1, 0)

        def states(state_out: Any, initial: Any) -> Any:
            rows = state_out[before]
            rows[~is_known] = initial
            return rows

        batch.initial_state = tree_map(states, batch.columns[Columns.STATE_OUT], self.initial_state)
        for c in np.flatnonzero(~is_known & (batch.t_started > 0)).tolist():
            if (known := state_before(int(batch.columns[REPLAY_KEY][batch.start[c]]))) is not None:
                tree_map(lambda rows, state, c=c: rows.__setitem__(c, state), batch.initial_state, known)


class EpisodeReplay(BatchSource):
    """A replay buffer. Every update adds its fresh steps and draws batches at the configured ratio.

    A rank whose buffer holds fewer steps than a batch draws at most the number that it holds, so that a rank that has
    just joined has less weight. Steps evicted for a failed update are not restored.

    Args:
        buffer: The buffer.
        batch_size: Env steps per batch on each rank.
        train_ratio, warm_up: See `ReplayRatio`; set by `UpdatePlan`.
        options: Additional arguments of `buffer.sample`: n_step, gamma, beta, … `beta` may be a schedule over the
            sampled env steps of all ranks together.

    Attributes:
        burn_ins: The burn-in of each stateful module, by id. Their batches are sequences; those of others are
            transitions.
        is_trained: Function of a module's id: whether batches may have its steps.
        gammas: γ by module, where it is not that of the options.
    """

    keeps_data = True

    def __init__(
        self,
        buffer: ReplayBuffer,
        *,
        batch_size: int,
        train_ratio: float,
        warm_up: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        self.buffer: ReplayBuffer = buffer
        self.batch_size: int = batch_size
        self.burn_ins: Mapping[str, BurnIn] = {}
        self.is_trained: Callable[[str], bool] = lambda module_id: True
        self.gammas: Mapping[str, float] = {}
        self.uses_priorities: bool = type(buffer).update_priorities is not ReplayBuffer.update_priorities
        self.options: dict[str, Any] = options
        self._beta = Schedule(options["beta"], "beta") if "beta" in options else None
        self.progress: ReplayRatio = ReplayRatio(train_ratio, warm_up)

    def add(self, episodes: Any) -> None:
        for batch in batches_of(episodes):
            self.buffer.add(batch)
        self.num_added += num_env_steps_of(episodes)

    def plan_batches(self, num_fresh: int, rank: int, num_ranks: int) -> int:
        self.progress.sampled(num_fresh)
        return self.progress.take(self.batch_size * num_ranks)

    def batches(self, num_batches: int, rng: np.random.Generator) -> Iterator[Any]:
        while num_batches > 0:
            num_batches -= 1
            num_items = min(self.batch_size, len(self.buffer))
            if not num_items:
                yield []
                continue
            if self.buffer.divides_by_module:
                module_ids = sorted(filter(self.is_trained, self.buffer.get_module_ids()))
                drawn = {module_id: self._draw(module_id, num_items, rng, 1)[0] for module_id in module_ids}
                yield joined(drawn) if drawn else []
            else:
                samples = self._draw(DEFAULT_MODULE_ID, num_items, rng, num_batches + 1)
                num_batches -= len(samples) - 1
                yield from samples

    def _draw(
        self, module_id: str, num_items: int, rng: np.random.Generator, most: int
    ) -> Sequence[EpisodeBatch]:
        """Draw items from the steps of one module: a batch, or up to `most` if the buffer can draw them at once."""
        burn_in = self.burn_ins.get(module_id)
        options = {**self.options, "rng": rng, **({} if burn_in is None else burn_in.options)}
        if module_id in self.gammas:
            options["gamma"] = self.gammas[module_id]
        if self._beta is not None:
            options["beta"] = self._beta.value(self.progress.num_sampled)
        samples = self.buffer.draw(module_id, num_items, num_samples=most, **options)
        if burn_in is not None:
            buffer = self.buffer.of_module(module_id)
            assert isinstance(buffer, EpisodeReplayBuffer)
            samples = [batch.updated() for batch in samples]
            for batch in samples:
                burn_in.extend(batch, buffer.state_before)
        return samples

    @property
    def num_env_steps(self) -> int:
        return len(self.buffer)

    @property
    def num_bytes(self) -> int:
        return self.buffer.num_bytes

    def get_metrics(self) -> dict[str, Any]:
        return self.buffer.get_metrics()

    def update_priorities(self, module_id: str, td_errors: Any, keys: Any) -> None:
        td_errors, keys = as_numpy(td_errors), as_numpy(keys)
        is_finite = np.isfinite(td_errors)
        self.buffer.of_module(module_id).update_priorities(td_errors[is_finite], keys[is_finite])

    def checkpoint(self) -> Any:
        self.buffer.mark()
        return self.num_added

    def rollback(self, checkpoint: Any) -> None:
        self.buffer.undo()
        self.num_added = checkpoint

    def get_state(self) -> dict[str, Any]:
        return {"buffer": self.buffer.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.buffer.set_state(state["buffer"])
        self.num_added: int = len(self.buffer)


# Share of the largest TD error in a sequence's priority, as in R2D2.
_ETA = 0.9


class _ReplaySettings(Protocol):
    """The config settings that ReplayLearner reads."""

    gamma: float
    n_step: int | tuple[int, int]
    train_batch_size_per_learner: int

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
        if self._burn_in_len and not self._burn_ins():
            raise ConfigurationError(
                f"config.burn_in_len={self._burn_in_len}: no module has a state to warm up. Leave it at 0, or set "
                "model_config['use_lstm']."
            )

    @property
    def _burn_in_len(self) -> int:
        return int(getattr(self.config, "burn_in_len", 0))

    def _burn_ins(self) -> dict[str, BurnIn]:
        """Return the burn-in of each stateful module."""
        return {
            module_id: BurnIn(
                self._burn_in_len,
                initial_state(module),
                max_seq_len(module) - self._burn_in_len,
                max(1, self._learner_connector.required_lookback),
            )
            for module_id, module in self.module.items()
            if module.is_stateful()
        }

    def _on_modules_changed(self) -> None:
        super()._on_modules_changed()
        if isinstance(self.source, EpisodeReplay):
            self._keep_modules(self.source)

    def _keep_modules(self, source: EpisodeReplay) -> None:
        """Store the steps of the modules that can be trained, those of stateful ones with states."""
        source.burn_ins = self._burn_ins()
        source.gammas = {module_id: self.config_for_module(module_id).gamma for module_id in self.module}
        if source.buffer.divides_by_module:
            source.buffer.keeps_extra_model_outputs = source.burn_ins.keys()
            source.buffer.keep_modules([m for m, module in self.module.items() if is_trainable(module)])

    def _may_train(self, module_id: str) -> bool:
        return callable(self.policies_to_train) or self.should_module_be_updated(module_id)

    @classmethod
    def check_module(cls, module_id: str, module: Any, config: BaseConfig) -> None:
        """Check a module, like Learner. A stateful module must be trainable on sequences from the buffer."""
        super().check_module(module_id, module, config)
        if not module.is_stateful():
            return
        settings = cast(_ReplaySettings, config)
        where, plan = module.describe(), settings.update_plan()
        burn_in_len = int(config.get("burn_in_len", 0))
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
        plan, given = settings.update_plan(), settings.replay_buffer_config
        kind = settings.replay_buffer_class
        arguments = {name: given[name] for name in kind.settings() if name in given}
        arguments["capacity"] = -(-given["capacity"] // plan.num_ranks)
        if "keeps_extra_model_outputs" in kind.settings():
            arguments["keeps_extra_model_outputs"] = self._burn_ins().keys()
        options: dict[str, Any] = {"n_step": settings.n_step, "gamma": settings.gamma}
        if lookback := self._learner_connector.required_lookback:
            options["lookback"] = lookback
            if not kind.draws_sequences or (settings.n_step != 1 and not self._burn_ins()):
                raise ConfigurationError(
                    f"config.n_step={settings.n_step}, config.replay_buffer_config['type']={kind.__name__!r}: a piece "
                    f"of learner_connector needs the {lookback} steps before each drawn one, as frame stacks do. These "
                    "are drawn with n_step=1 only, from an EpisodeReplayBuffer or PrioritizedEpisodeReplayBuffer. Or "
                    "stack frames in the environment: wrappers=['FrameStackObservation(stack_size=4)']."
                )
        if kind.uses_priorities:
            options["beta"] = given["beta"]
        buffer = kind.from_config(self.config, **arguments)
        source = EpisodeReplay(
            buffer,
            batch_size=settings.train_batch_size_per_learner,
            train_ratio=plan.train_ratio,
            warm_up=plan.warm_up,
            **options,
        )
        source.is_trained = self._may_train
        self._keep_modules(source)
        return source

    def drawn_n(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the n of each sequence's sums of rewards, int64 [B]."""
        n, rewards = self._replay_settings.n_step, batch[Columns.REWARDS]
        least, most = (n, n) if isinstance(n, int) else n
        if least == most:
            return torch.full(rewards.shape[:1], least, device=rewards.device)
        return torch.randint(least, most + 1, rewards.shape[:1], device=rewards.device)

    @property
    def needs_td_errors(self) -> bool:
        """Whether anybody reads what `note_td_errors` gets: a source with priorities, or a subclass."""
        return self.source.uses_priorities or (type(self).note_td_errors is not ReplayLearner.note_td_errors)

    def note_td_errors(self, module_id: str, batch: Mapping[str, Any], td_errors_B: Tensor) -> None:
        """Set the TD errors of a module's rows, float [B], which become priorities if the minibatch's step is taken.

        Of sequences, they are those of the trained steps, in the order of ``loss_mask``.

        Raises:
            ValueError: There are not as many as rows.
        """
        if not self.source.uses_priorities:
            return
        mask = batch.get(Columns.LOSS_MASK)
        keys_B = batch.get(REPLAY_KEY if mask is None else "priority_key")
        if keys_B is None:  # a batch made by the user
            return
        td_errors_B = td_errors_B.detach()
        if td_errors_B.dim() != 1 or (mask is None and len(td_errors_B) != len(keys_B)):
            raise ValueError(
                f"{type(self).__name__}.note_td_errors, module {module_id!r}: expected one TD error per row of "
                f"{len(keys_B)} (of sequences, per trained step), got {tuple(td_errors_B.shape)}."
            )
        if mask is not None:
            keys_B, td_errors_B = keys_B[:, 0], sequence_priorities(td_errors_B, mask)
        self._td_errors[module_id] = keys_B, td_errors_B

    def before_gradient_based_update(self, *, timesteps: Mapping[str, Any]) -> None:
        super().before_gradient_based_update(timesteps=timesteps)
        self._td_errors = {}

    def apply_gradients(self, gradients_dict: dict[Tensor, Tensor]) -> None:
        """Step the optimizers, then update target networks and priorities."""
        super().apply_gradients(gradients_dict)
        noted, self._td_errors = self._td_errors, {}
        for module_id, (keys_B, td_errors_B) in noted.items():
            self.source.update_priorities(module_id, td_errors_B, keys_B)


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
