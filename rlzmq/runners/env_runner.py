"""EnvRunner: samples episodes with an environment, a module and two connector pipelines.

This base class contains what all runners share: sample calls, the vector env's lifecycle, seeds, counters and metrics,
modules, weights and states. A sampler, chosen when env, modules or pipelines change, owns the sampling loop.
"""

from __future__ import annotations

import inspect
import logging
import time
import uuid
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import gymnasium as gym
import torch

from rlzmq.config.base_config import BaseConfig
from rlzmq.connectors.defaults import change_modules, module_spaces
from rlzmq.core import trace
from rlzmq.core.call_watch import CallWatch
from rlzmq.core.callbacks import CallbackList
from rlzmq.core.checkpoint import Checkpointable, chosen_parts
from rlzmq.core.errors import ClosedError, ConfigurationError, Interrupted
from rlzmq.core.metrics import NUM_VECTOR_STEPS_PER_SAMPLE, MetricsLogger, ReducedMetrics, StageTimers
from rlzmq.core.signatures import TellsUncalled
from rlzmq.core.update_plan import derive_seed
from rlzmq.envs.registry import EnvContext
from rlzmq.episodes.bad_values import BadChunks
from rlzmq.episodes.columns import DEFAULT_MODULE_ID
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.modules.multi_rl_module import MultiRLModule
from rlzmq.modules.output_check import check_acting_outputs
from rlzmq.modules.weights import WeightsLayout
from rlzmq.replay.shards import EpisodeRecorder
from rlzmq.runners.env_failures import EnvFailures, close_env
from rlzmq.runners.episode_metrics import (
    EpisodeMetrics,
    EpisodeTotals,
    FinishedEpisodes,
    FragmentMeta,
    add_finished,
    length_of,
    returns_of,
)

__all__ = ["EnvRunner", "SampleRequest"]

_log = logging.getLogger("rlzmq.runners")

_KEPT = "connector pieces keep what a checkpoint has of runners, with get_state() and set_state()"
_EMPTY_S = 10.0  # until the first warning; the next one comes after six times as long
_WATCHED = "a process that dies or hangs is replaced, see fault_tolerance()"
_EPISODE_HOOKS = ("on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end")


@dataclass(frozen=True)
class SampleRequest:
    """The extent of a sampling call; exactly one of the three counts is set.

    Attributes:
        explore: Sample from the exploration distribution instead of acting greedily.
        random_actions: Sample actions from the action space.
        num_vector_steps: Exact number of vector steps (a lease).
        num_timesteps: Minimum number of env steps, or of agent steps (``config.count_steps_by``).
        num_episodes: Exact number of finished episodes.
        ends_at: With num_vector_steps: stop after the vector step that ends after this time.perf_counter().
    """

    explore: bool
    random_actions: bool = False
    num_vector_steps: int | None = None
    num_timesteps: int | None = None
    num_episodes: int | None = None
    ends_at: float | None = None

    def num_more_vector_steps(
        self, num_vector_steps: int, num_steps: int, num_ends: int, most_per_vector_step: int
    ) -> int:
        """Return a number of vector steps that are certainly left to make; 0 when the request is fulfilled.

        Args:
            num_vector_steps: Vector steps made so far.
            num_steps: Env steps so far, without autoreset steps; agent steps if ``num_timesteps`` counts those.
            num_ends: Number of episodes that have ended so far.
            most_per_vector_step: Maximum number of these steps per vector step.
        """
        if self.num_vector_steps is not None:
            num_left = self.num_vector_steps - num_vector_steps
            if self.ends_at is None:
                return num_left
            is_late = num_vector_steps > 0 and time.perf_counter() >= self.ends_at
            return 0 if is_late else min(num_left, 1)
        if self.num_timesteps is not None:
            return max(-(-(self.num_timesteps - num_steps) // most_per_vector_step), 0)
        return int(num_ends < (self.num_episodes or 0))


STATE_COMPONENTS = (
    "rl_module",
    "weights_seq_no",
    "env_to_module_connector",
    "module_to_env_connector",
    "num_env_steps_sampled_lifetime",
)


class EnvRunner(TellsUncalled, Checkpointable):
    """Samples episodes with a module in environments.

    To sample from something that is no Gymnasium env, derive from this class, override `make_env` (`env` may be
    anything) and `sample`, which returns episodes, and set both spaces in the config. `module` has the newest
    weights at each call; `env_to_module` and `module_to_env` are the config's pipelines. What `sample` returns
    beyond a run's lease counts for the next one. Overrides of `sample` and `get_metrics` may also call the base's.

    Args:
        config: The AlgorithmConfig. The runner keeps an unfrozen copy.
        worker_index: Index within the group, 1-based; 0 for the local runner. Seeds derive from it. The local runner
            draws the same numbers as runner 1, so a serial run equals a run with one runner process.
        incarnation: Number of restarts of this runner; each incarnation draws different random numbers.
        num_workers: Number of remote runners (default: ``config.num_env_runners``).

    Attributes:
        use_rows: Set to False to always build real episodes.
        shared_data: Dict shared by the pieces of both pipelines between two full resets.
        config: The runner's copy. To use another ``env_config``, change it and call ``make_env``.
        env: The vector env; may be wrapped or changed between calls.
        module: The acting module (single-agent: an RLModule, multi-agent: a MultiRLModule).
        env_to_module, module_to_env: The connector pipelines.
        metrics: A MetricsLogger for callbacks and connector pieces.
        timers: Seconds per stage of the current sample call.
        weights_seq_no: The version of the weights in use, stored with each step.
        generator: The torch generator of all action sampling.
        failures: Counts failures of environments and decides about each.
        env_watch: Watches calls of environments; by default without a thread.
    """

    checkpoint_name = "env_runner"
    _not_called: ClassVar[Mapping[str, str]] = {
        "get_state": _KEPT,
        "set_state": _KEPT,
        "apply": "use a callback, or EnvRunnerGroup.foreach_env_runner()",
        "assert_healthy": _WATCHED,
        "get_weights": "weights come from the learners",
        "ping": _WATCHED,
    }

    def __init__(
        self,
        *,
        config: BaseConfig,
        worker_index: int = 0,
        incarnation: int = 0,
        num_workers: int | None = None,
        **kwargs: object,
    ) -> None:
        self.config: BaseConfig = config.copy(copy_frozen=False)
        self.worker_index = worker_index
        self.stream_index: int = max(worker_index, 1)
        self.incarnation = incarnation
        self.num_workers: int = config.num_env_runners if num_workers is None else num_workers
        self.num_envs: int = config.num_envs_per_env_runner
        self.seed: int | None = config.seed
        self.callbacks: CallbackList = CallbackList(config)
        self.metrics: MetricsLogger = MetricsLogger(stats_cls_lookup=config.custom_stats_cls_lookup)
        self.episode_metrics: EpisodeMetrics = EpisodeMetrics(config.metrics_num_episodes_for_smoothing)
        self.timers: StageTimers = StageTimers()
        self.env_watch: CallWatch = CallWatch()
        self.env: Any = None
        self.module: Any = None
        self.multi_rl_module: Any = None
        self.env_to_module: Any = None
        self.module_to_env: Any = None
        self.weights_seq_no: int = 0
        self.weights_generation: int = 0
        self.generator: torch.Generator = torch.Generator()
        if self.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(derive_seed(self.seed, "policy", self.stream_index, incarnation))
        self.failures: EnvFailures = EnvFailures(self)
        self._num_env_steps_lifetime_base = 0
        self._num_env_steps_since_base = 0
        self._num_envs_made = 0
        self._weights_layout: Any = None
        self._synced_module_ids: list[str] | None = None
        self._last_sample_end: float | None = None
        self.use_rows = True
        self.shared_data: dict[str, Any] = {}
        self._sampler: Any = None
        self._bad_chunks = BadChunks(self)
        self._sampler_made_of: tuple[Any, ...] = ()
        self._needs_seed = True
        self._seed_coordinates: tuple[int, ...] = ()  # of the next seeded reset; () at the start of the run
        self._id_prefix = uuid.uuid4().hex[:20]
        self._num_episode_ids = 0
        self._recorder = _recorder_for(config)
        self._is_stopped = False
        # Of an overridden `sample`: metas of calls of the base class's, the rest of a lease, sums of ongoing episodes.
        self._samples_itself = type(self).sample is not EnvRunner.sample
        self._inner_metas: list[FragmentMeta] = []
        self._left_over: Any = None
        self._totals: dict[str, EpisodeTotals] = {}
        self._empty_since_s: float | None = None
        self._next_warning_s = _EMPTY_S
        # What `get_metrics` has returned, and logged states.
        self._told: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        self.make_env()
        self.make_module()

    # -- sampling ------------------------------------------------------------------------------

    def sample(
        self,
        *,
        num_timesteps: int | None = None,
        num_episodes: int | None = None,
        explore: bool | None = None,
        random_actions: bool = False,
        force_reset: bool = False,
    ) -> Any:
        """Sample until there are enough steps or episodes.

        Args:
            num_timesteps: Minimum number of env steps (at most num_envs - 1 more are sampled); unfinished episodes
                are returned as chunks and continue in the next call.
            num_episodes: Exact number of whole episodes; all envs are reset first, and unfinished episodes are
                discarded. At most one of the two may be given; with neither, sample a fragment
                (``config.batch_mode`` "truncate_episodes") or num_envs episodes ("complete_episodes").
            explore: Sample actions from the exploration distribution instead of acting greedily (default:
                ``config.explore``).
            random_actions: Sample actions from the action space, without the module; episodes store them as the module
                would have chosen them. Unfinished episodes with other actions are dropped.
            force_reset: Reset all envs first.

        Returns:
            A sequence of episodes: finished ones in the order of finishing, then ongoing chunks by env index.

        Raises:
            AssertionError: Both counts are given, or one is negative.
            EnvError: An environment raised an error and could not, or may not, be recreated.
            ClosedError: The runner was stopped.
        """
        if num_timesteps is not None and num_episodes is not None:
            raise AssertionError("sample(): give num_timesteps or num_episodes, not both.")
        for name, value in (("num_timesteps", num_timesteps), ("num_episodes", num_episodes)):
            if value is not None and value < 0:
                raise AssertionError(f"sample({name}={value}): expected a number >= 0.")
        config = self.config
        if num_timesteps is None and num_episodes is None:
            if config.batch_mode == "complete_episodes":
                num_episodes = self.num_envs
            else:
                num_timesteps = config.get_rollout_fragment_length(self.worker_index) * self.num_envs
        if not (num_timesteps or num_episodes):
            return []
        explore = config.explore if explore is None else explore
        request = SampleRequest(
            explore, random_actions, num_timesteps=num_timesteps, num_episodes=num_episodes
        )
        return self._run(request, force_reset or num_episodes is not None)

    def sample_lease(
        self,
        num_vector_steps: int,
        *,
        max_s: float | None = None,
        explore: bool | None = None,
    ) -> Any:
        """Sample ``num_vector_steps`` vector steps and continue the ongoing episodes.

        The trajectories depend only on the total number of vector steps, not on how they are split into calls.

        Args:
            num_vector_steps: At least 1.
            max_s: Stop after the vector step that reaches this number of seconds.
            explore: As for `sample`.

        Returns:
            An EpisodeBatch whose columns have ``num_envs * (lookback + num_vector_steps + 1)`` slots, even if
            sampling stopped early; its ``meta`` has num_env_steps, num_vector_steps, weights_version,
            weights_generation and episode_metrics (lists of returns, lengths and durations_s of the
            episodes that finished).
        """
        if num_vector_steps < 1:
            raise ValueError(f"sample_lease: expected num_vector_steps >= 1, got {num_vector_steps}.")
        if self._samples_itself:
            return self._lease_of_own_sample(num_vector_steps * self.num_envs)
        request = SampleRequest(
            explore=self.config.explore if explore is None else explore,
            num_vector_steps=num_vector_steps,
            ends_at=None if max_s is None else time.perf_counter() + max_s,
        )
        return self._run(request, force_reset=False)

    def _run(self, request: SampleRequest, force_reset: bool) -> Any:
        if self._is_stopped:
            raise ClosedError(f"Env runner {self.worker_index} was stopped: create a new one to sample.")
        start_s = time.perf_counter()
        first, last = self.env_to_module, self.module_to_env
        edits = (first.num_edits, first.time_pieces, last.num_edits, last.time_pieces)
        made_of = (self.module, self.use_rows, first, last, *edits)
        sampler = self._sampler
        if sampler is None or sampler.stepper.env is not self.env or made_of != self._sampler_made_of:
            sampler = self._choose_sampler()
            self._sampler_made_of = made_of
        is_mixed = sampler.random_actions != request.random_actions
        if force_reset or is_mixed or not sampler.has_episodes:
            self.shared_data.clear()
            self.shared_data["generator"] = self.generator
            sampler.reset()
        try:
            batch, finished, num_vector_steps = sampler.run(request)
        except BaseException:
            sampler.forget()  # a step was interrupted, so nothing can be continued
            raise
        batch, num_left_out = self._bad_chunks.left_out_of(batch)
        finished.leave_out_unusable()
        batch.meta = self._meta_of(batch, num_vector_steps, finished, num_left_out)
        if self._samples_itself:
            self._inner_metas.append(batch.meta)
        if "on_sample_end" in self.callbacks.hooks:
            self.callbacks.call("on_sample_end", env_runner=self, metrics_logger=self.metrics, samples=batch)
            batch = batch.updated()
            batch.meta["num_env_steps"] = batch.num_env_steps
        if self._recorder is not None:
            self._recorder.add(batch)
        self.timers.add(NUM_VECTOR_STEPS_PER_SAMPLE, num_vector_steps)
        batch.meta["timers"] = self._time_sample(start_s)
        return batch

    def _meta_of(
        self, batch: Any, num_vector_steps: int, finished: FinishedEpisodes, num_left_out: int
    ) -> FragmentMeta:
        """Count a batch; return its meta."""
        num_env_steps = batch.num_env_steps
        meta: FragmentMeta = {
            "worker_index": self.worker_index,
            "incarnation": self.incarnation,
            "num_env_steps": num_env_steps,
            "num_vector_steps": num_vector_steps,
            "weights_version": self.weights_seq_no,
            "weights_generation": self.weights_generation,
            "episode_metrics": vars(finished),
        }
        meta.update(batch.agent_counts())
        self._num_env_steps_since_base += num_env_steps
        self.episode_metrics.add_fragment(meta)
        if num_left_out:
            meta["num_env_steps_not_finite"] = num_left_out
        return meta

    def _choose_sampler(self) -> Any:
        """Make and return the sampler for the current env, modules, pipelines and callbacks."""
        self.env_watch.attend(self.env)
        wants_episodes = not self.callbacks.hooks.keys().isdisjoint(_EPISODE_HOOKS)
        on_rows = self.use_rows and self.env_to_module.on_rows and self.module_to_env.on_rows
        self._sampler = self._make_sampler(on_rows=on_rows and not wants_episodes)
        return self._sampler

    # -- called by samplers --------------------------------------------------------------------

    def take_reset_seed(self) -> int | None:
        """Return the seed of the next reset; only a vector env's first reset is seeded."""
        if not self._needs_seed:
            return None
        self._needs_seed = False
        return self.env_seed(*self._seed_coordinates)

    def new_episode_id(self) -> str:
        """Return an id that is unique across processes."""
        self._num_episode_ids += 1
        return f"{self._id_prefix}{self._num_episode_ids:012x}"

    # -- defined by subclasses -----------------------------------------------------------------

    def _make_vector_env(self, context: EnvContext) -> object:
        """Make and return the vector env."""
        raise NotImplementedError(
            f"{type(self).__name__}: override make_env() and sample(), or derive from SingleAgentEnvRunner."
        )

    def make_stepper(self) -> Any:
        """Return what resets and steps the vector env; see `rlzmq.runners.vector_env_runners`."""
        raise NotImplementedError

    @property
    def random_action_space(self) -> gym.Space[Any]:
        """The space of ``env`` that random actions are sampled from."""
        space: gym.Space[Any] = self._env_spaces()["__env__"][1]
        return space

    def _make_sampler(self, *, on_rows: bool) -> object:
        """Return a sampler that works on rows, or one with real episodes."""
        raise NotImplementedError

    # -- for the driver ------------------------------------------------------------------------

    def take_fragment(self, num_vector_steps: int, max_s: float | None = None) -> Any:
        """Sample a lease; the batch's meta has the logged metrics, too, and the connector delta if there is one."""
        batch = self.sample_lease(num_vector_steps, max_s=max_s)
        num_env_steps = num_vector_steps * self.num_envs
        if batch.num_env_steps > num_env_steps:
            _log.warning(
                "Env runner %d: on_sample_end made %d env steps of a lease of %d; the last %d are left out.",
                self.worker_index, batch.num_env_steps, num_env_steps, batch.num_env_steps - num_env_steps,
            )  # fmt: skip
            batch = batch.split(num_env_steps)[0]
            batch.meta["num_env_steps"] = num_env_steps
        if delta := self.get_connector_delta():
            batch.meta["connector_delta"] = delta
        if custom := self.take_logged():
            batch.meta["custom_metrics"] = custom
        return batch

    def sample_with_metrics(self, options: Mapping[str, Any]) -> Any:
        """Return ``sample_batch(**options)`` with the metrics logged since the last fragment in the batch's meta."""
        batch = self.sample_batch(**options)
        if custom := self.take_logged():
            batch.meta["custom_metrics"] = custom
        return batch

    # -- overridden methods --------------------------------------------------------------------

    def sample_batch(self, **options: Any) -> Any:
        """Call `sample`, which may be overridden; return its episodes as a batch with its meta (see `sample_lease`).

        Args:
            options: Arguments of `sample`. An override gets those that it takes.
        """
        if not self._samples_itself:
            return self.sample(**options)
        start_s = time.perf_counter()
        self._inner_metas.clear()
        parameters = inspect.signature(self.sample).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        episodes = self.sample(**{name: options[name] for name in options if takes_all or name in parameters})
        inner, self._inner_metas = self._inner_metas, []
        if not isinstance(episodes, EpisodeBatch):
            episodes = EpisodeBatch.from_episodes(episodes)
        batch: Any = episodes.updated()
        if inner:  # `sample` of the base class has counted
            batch.meta = inner[-1]
            for meta in inner[:-1]:
                add_finished(batch.meta["episode_metrics"], meta["episode_metrics"])
        else:
            batch, num_left_out = self._bad_chunks.left_out_of(batch)
            batch.meta = self._meta_of(batch, 0, self._finished_of(batch), num_left_out)
            if self._recorder is not None:
                self._recorder.add(batch)
            batch.meta["timers"] = self._time_sample(start_s)
        batch.meta["num_env_steps"] = batch.num_env_steps
        return batch

    def _lease_of_own_sample(self, num_env_steps: int) -> Any:
        """Return what an overridden `sample` returned, as far as the lease has room; the next one gets the rest."""
        batch, self._left_over = self._left_over, None
        if batch is None:
            batch = self.sample_batch(num_timesteps=num_env_steps)
            self._warn_if_empty(batch.num_env_steps)
        if batch.num_env_steps > num_env_steps:
            meta = batch.meta
            batch, self._left_over = batch.split(num_env_steps)
            batch.meta = {**meta, "num_env_steps": num_env_steps}
            rest = self._left_over.num_env_steps
            self._left_over.meta = {**meta, "num_env_steps": rest, "episode_metrics": {}, "timers": {}}
        return batch

    def _warn_if_empty(self, num_env_steps: int) -> None:
        """Log a warning if `sample` has returned no env steps for long."""
        now_s = time.perf_counter()
        if num_env_steps or self._empty_since_s is None:
            self._empty_since_s, self._next_warning_s = None if num_env_steps else now_s, _EMPTY_S
        elif (empty_s := now_s - self._empty_since_s) >= self._next_warning_s:
            self._next_warning_s *= 6
            _log.warning(
                "%s.sample() has returned no env steps for %.0f s; training waits for some.",
                type(self).__name__,
                empty_s,
            )

    def _finished_of(self, batch: Any) -> FinishedEpisodes:
        """Return the statistics of the episodes that ended, with the sums of their earlier chunks."""
        finished = FinishedEpisodes()
        for episode in batch.new_items():
            totals = self._totals.setdefault(episode.id_, EpisodeTotals())
            totals.add(*returns_of(episode))
            if episode.is_done:
                del self._totals[episode.id_]
                finished.add(totals, length_of(episode), time.perf_counter() - totals.started_s)
        return finished

    # -- unfinished episodes -------------------------------------------------------------------

    def drop_unfinished_episodes(self) -> None:
        """Drop unfinished episodes. The next sample resets all envs; their random generators continue."""
        self._left_over = None
        self._totals.clear()
        if self._sampler is not None:
            self._sampler.forget()

    def begin_again(self, number: int) -> None:
        """Begin new episodes, e.g. after a checkpoint was restored.

        The random streams differ from those at the run's start, and are the same for every runner with this index.

        Args:
            number: A count of the run, e.g. the env steps sampled so far.
        """
        self.drop_unfinished_episodes()
        self._needs_seed = True
        self._seed_coordinates = (number & 0x7FFFFFFF, 1, 0)
        if self.seed is not None:
            place = (self.stream_index, self.incarnation, number & 0x7FFFFFFF, 1)
            self.generator.manual_seed(derive_seed(self.seed, "policy", *place))
            self.random_action_space.seed(derive_seed(self.seed, "random_actions", *place))

    # -- environment ---------------------------------------------------------------------------

    def make_env(self) -> None:
        """Recreate the vector env, e.g. after a change of ``config.env_config``, and close the old one.

        Unfinished episodes are dropped, and the next ``sample`` begins with a reset of all envs with their seeds.
        """
        if self.env is not None:
            close_env(self.env, self.worker_index)
            self.env = None
        self._needs_seed = True
        self.drop_unfinished_episodes()
        self.remake_env()

    def remake_env(self) -> Any:
        """Replace a failed vector env. The ongoing sample call continues with the new one."""
        context = EnvContext(
            self.config.env_config or {},
            worker_index=self.worker_index,
            num_workers=self.num_workers,
            recreated_worker=self.incarnation > 0,
        )
        self._num_envs_made += 1
        with self.env_watch.call(self.env_watch.RESETS):
            self.env = self._make_vector_env(context)
            if self.seed is not None:
                self.random_action_space.seed(
                    derive_seed(self.seed, "random_actions", self.stream_index, self.incarnation)
                )
        self.env_watch.attend(self.env)
        if "on_environment_created" in self.callbacks.hooks:
            self.callbacks.call(
                "on_environment_created",
                env_runner=self,
                metrics_logger=self.metrics,
                env=self.env,
                env_context=context,
            )
        return self.env

    def env_seed(self, *coordinates: int) -> int | None:
        """Return the seed of the vector env's first reset (or of a recreated part); None if the run has no seed."""
        if self.seed is None:
            return None
        return derive_seed(
            self.seed, "env", self.stream_index, self.incarnation, self._num_envs_made, *coordinates
        )

    def describe_envs(self) -> str:
        """Return the settings and seeds that determine the environments, in parentheses."""
        return (
            f"(env_config {dict(self.config.env_config or {})}, run seed {self.seed}, "
            f"env seed {self.env_seed()}, incarnation {self.incarnation}, "
            f"vector env number {self._num_envs_made}, {self.num_env_steps_sampled} env steps before)"
        )

    def foreach_env(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call ``func`` with each environment of this process.

        Args:
            func: Takes one environment (a native vector env counts as one).

        Returns:
            The results, in env order.

        Raises:
            ConfigurationError: The environments run in other processes (mode "async").
        """
        base = getattr(self.env, "unwrapped", self.env)
        envs = getattr(base, "envs", None)
        if envs is not None:
            return [func(env) for env in envs]
        if hasattr(base, "parent_pipes"):
            raise ConfigurationError(
                "foreach_env: with gym_env_vectorize_mode='async' the environments run in other processes. "
                "Use env_runner.env.call(method_name, ...) or env_runner.env.set_attr(name, values)."
            )
        return [func(self.env)]

    # -- counters and metrics ------------------------------------------------------------------

    @property
    def num_env_steps_sampled(self) -> int:
        """Env steps of this runner over its lifetime."""
        return self.episode_metrics.num_env_steps_lifetime

    @property
    def global_env_steps(self) -> int:
        """Estimate of all runners' lifetime env steps, passed to modules as ``t`` for exploration schedules."""
        runners = max(self.num_workers, 1)
        return (self._num_env_steps_lifetime_base // runners + self._num_env_steps_since_base) * runners

    def get_metrics(self) -> ReducedMetrics:
        """Return the metrics since the last call under RLlib's keys, with the values that callbacks logged.

        ``algorithm.metrics.aggregate([runner.get_metrics(), …], key="env_runners")`` adds them to a run's results.
        """
        states = self.episode_metrics.states()
        result = self.episode_metrics.reduce()
        result["weights_seq_no"] = self.weights_seq_no
        if self.failures.num:
            result["num_env_failures_lifetime"] = self.failures.num
        logged = self.metrics.compile()
        result.update(logged)
        self._told = dict(result), logged.states
        return ReducedMetrics(result, {**states, **logged.states})

    def take_logged(self) -> dict[str, Any]:
        """Return states: of what callbacks logged since the last call, and of what an overridden `get_metrics` adds."""
        if type(self).get_metrics is EnvRunner.get_metrics:
            return self.metrics.reduce(compile=False) if len(self.metrics) else {}
        self._told = {}, {}
        reduced, (known, logged) = self.get_metrics(), self._told
        own = MetricsLogger()
        for name, value in reduced.items():
            if value is not known.get(name):
                own.log_dict({name: value})
        return {**logged, **own.reduce(compile=False)}

    def _time_sample(self, start_s: float) -> dict[str, list[float]]:
        """Finish timing a sample call that began at ``start_s``; return the timers since the previous one."""
        timers = self.timers
        if self._last_sample_end is not None:
            timers.add("time_between_sampling", start_s - self._last_sample_end)
            if trace.is_on:
                trace.span("wait", self._last_sample_end, start_s)
        self._last_sample_end = time.perf_counter()
        timers.add("sample", self._last_sample_end - start_s)
        if trace.is_on:
            trace.span("sample", start_s, self._last_sample_end, weights_version=self.weights_seq_no)
        for name, pipeline in self._pipelines().items():
            if pipeline.timers:
                timers.add_pieces(pipeline, f"{name}/")
        sums = timers.take()
        self.episode_metrics.timers.merge(sums)
        return sums

    # -- modules and pipelines -----------------------------------------------------------------

    def _acting_module(self) -> Any:
        """Return the acting module of ``multi_rl_module``, the value of ``module``."""
        modules = self.multi_rl_module
        return modules[DEFAULT_MODULE_ID] if list(modules.keys()) == [DEFAULT_MODULE_ID] else modules

    def _module_spaces(self) -> dict[str, tuple[Any, Any]]:
        """Return (observation space, action space) by module id."""
        action_space = self._env_spaces()["__env_single__"][1]
        return module_spaces(self.config, self.env_to_module.observation_space, action_space)

    def make_module(self) -> None:
        """Build the pipelines and the inference-only module from the config, with fresh weights."""
        spaces = self._env_spaces()
        self.env_to_module = self.config.build_env_to_module_connector(env=self.env, spaces=spaces)
        self.module_to_env = self.config.build_module_to_env_connector(env=self.env, spaces=spaces)
        spec = self.config.get_multi_rl_module_spec(
            env=self.env, spaces=self.get_spaces(), inference_only=True
        )
        self.multi_rl_module = spec.build(seed=self.seed)
        self._prepare_to_act(self.multi_rl_module.keys())
        if hasattr(self.multi_rl_module, "eval"):
            self.multi_rl_module.eval()
        self._weights_layout = None
        self.module = self._acting_module()

    def get_spaces(self) -> dict[str, tuple[Any, Any]]:
        """Return the spaces by name.

        Returns:
            ``{"__env__": (obs, act) of the vector env, "__env_single__": (obs, act) of one env,
            module_id: (obs after the env-to-module pipeline, act)}``. Modules whose agents are not known in advance
            are left out.
        """
        return {**self._env_spaces(), **self._module_spaces()}

    def _env_spaces(self) -> dict[str, tuple[Any, Any]]:
        env = self.env
        if not hasattr(env, "single_observation_space"):  # of a runner's own
            single = self.config.single_spaces()
            return {"__env__": single, "__env_single__": single}
        return {
            "__env__": (env.observation_space, env.action_space),
            "__env_single__": (env.single_observation_space, env.single_action_space),
        }

    def _prepare_to_act(self, module_ids: Iterable[str]) -> None:
        """Give modules this runner's seed for what they draw themselves, and check their outputs."""
        modules = self.multi_rl_module
        module_ids = list(module_ids)
        for module_id in module_ids:
            seed = derive_seed(self.generator.initial_seed(), "exploration", zlib.crc32(module_id.encode()))
            modules[module_id].exploration_seed = seed
        shares_nothing = type(modules)._forward_exploration is MultiRLModule._forward_exploration
        if shares_nothing:
            for module_id in module_ids:
                check_acting_outputs(modules[module_id])

    def change_modules(self, config: BaseConfig, synced_module_ids: list[str] | None = None) -> None:
        """Replace the set of modules, between two samples.

        New modules get weights from the seed or their spec; remaining modules keep theirs. Ongoing episodes continue
        with the modules that their agents were mapped to. If one of those was removed, unfinished episodes are
        dropped. The envs keep the settings of the runner's own config.

        Args:
            config: The config with the new modules.
            synced_module_ids: Modules whose weights `set_weights` provides; None: all.
        """
        before, self.config = self.config, config.copy(copy_frozen=False)
        self.config.environment(before.env, env_config=before.env_config)
        config = self.config
        for pipeline in self._pipelines().values():
            change_modules(pipeline, config)
        spec = config.get_multi_rl_module_spec(env=self.env, spaces=self.get_spaces(), inference_only=True)
        modules = self.multi_rl_module
        gone = [module_id for module_id, _ in modules.items() if module_id not in spec]
        for module_id in gone:
            modules.remove_module(module_id)
        for module_id in spec.rl_module_specs:
            if module_id not in modules:
                module = spec.build(module_id, seed=self.seed)
                modules.add_module(module_id, module.eval() if hasattr(module, "eval") else module)
                self._prepare_to_act([module_id])
        self._synced_module_ids = synced_module_ids
        self._weights_layout = None
        if gone:
            self.drop_unfinished_episodes()

    # -- weights -------------------------------------------------------------------------------

    def get_weights_layout(self) -> Any:
        """Return the byte layout of the weights for ``set_weights`` (a ``WeightsLayout``)."""
        if self._weights_layout is None:
            self._weights_layout = WeightsLayout.of(
                self.multi_rl_module, inference_only=True, module_ids=self._synced_module_ids
            )
        return self._weights_layout

    def set_weights(
        self,
        buffer: object,
        version: int,
        generation: int = 0,
        num_env_steps: int | None = None,
        *,
        may_keep: bool = False,
    ) -> bool:
        """Load a snapshot of the weights.

        Args:
            buffer: ``get_weights_layout().num_bytes`` bytes.
            version: Version of the snapshot, stored with each step; 0 loads it unconditionally.
            generation: Generation of the learner group.
            num_env_steps: Lifetime env steps of the run so far, from which exploration schedules continue; None: they
                continue from this runner's own estimate.
            may_keep: See `WeightsLayout.load`.

        Returns:
            False if a newer version (or generation) is already in use and nothing was loaded.

        Raises:
            ValueError: The buffer's size does not match.
        """
        if version and (generation, version) < (self.weights_generation, self.weights_seq_no):
            return False
        self.get_weights_layout().load(self.multi_rl_module, buffer, may_keep=may_keep)
        self._note_weights(version, generation, num_env_steps)
        return True

    def copy_weights(self, module: object, version: int, num_env_steps: int) -> None:
        """Copy the weights of a learner's MultiRLModule in this process. The arguments are those of `set_weights`."""
        self.get_weights_layout().copy(module, self.multi_rl_module)
        self._note_weights(version, 0, num_env_steps)

    def _note_weights(self, version: int, generation: int, num_env_steps: int | None) -> None:
        self.weights_seq_no = version
        self.weights_generation = generation
        if num_env_steps is not None:
            self._num_env_steps_lifetime_base, self._num_env_steps_since_base = num_env_steps, 0

    # -- connectors ----------------------------------------------------------------------------

    def get_connector_delta(self) -> dict[str, Any]:
        """Return the statistics that connector pieces accumulated since the last call, to be merged elsewhere.

        Returns:
            ``{"env_to_module_connector": {piece: delta}, "module_to_env_connector": {…}}``, without empty
            entries.
        """
        deltas = {}
        for name, pipeline in self._pipelines().items():
            if pipeline.learning and (delta := pipeline.get_delta()):
                deltas[name] = delta
        return deltas

    def set_connector_state(self, state: Mapping[str, Any]) -> None:
        """Load merged connector states into the pipelines. Statistics since the last delta are kept.

        Args:
            state: ``{"env_to_module_connector": …, "module_to_env_connector": …}``; either may be missing.
        """
        for name, pipeline in self._pipelines().items():
            if state.get(name):
                pipeline.apply_merged_state(state[name])

    def _pipelines(self) -> dict[str, Any]:
        return {
            "env_to_module_connector": self.env_to_module,
            "module_to_env_connector": self.module_to_env,
        }

    # -- state ---------------------------------------------------------------------------------

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        inference_only: bool = True,
    ) -> dict[str, Any]:
        """Return the runner's state by component.

        Args:
            components: Names, or paths such as ``"rl_module/policy_1"``; None for all of
                rl_module, weights_seq_no, env_to_module_connector, module_to_env_connector and
                num_env_steps_sampled_lifetime.
            not_components: Names to leave out.
            inference_only: Whether to leave out what modules need for training only, if they have it.

        Returns:
            Component -> plain state; ``rl_module`` by module id.

        Raises:
            ValueError: A name is unknown.
        """
        chosen = chosen_parts(STATE_COMPONENTS, components, not_components, whose="an env runner's state")
        state: dict[str, Any] = {}
        if "rl_module" in chosen:
            inside, outside = chosen["rl_module"]
            state["rl_module"] = self.multi_rl_module.get_state(
                inside, not_components=outside, inference_only=inference_only
            )
        if "weights_seq_no" in chosen or "rl_module" in state:
            state["weights_seq_no"] = self.weights_seq_no
        for name, pipeline in self._pipelines().items():
            if name in chosen:
                state[name] = pipeline.get_state()
        if "num_env_steps_sampled_lifetime" in chosen:
            state["num_env_steps_sampled_lifetime"] = (
                self._num_env_steps_lifetime_base + self._num_env_steps_since_base
            )
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Load the components in ``state``; missing components keep their values.

        Args:
            state: From ``get_state``. Weights are loaded if ``weights_seq_no`` is missing, 0, or newer than the
                current one. ``rl_module`` may also be the state of a single-agent module.
        """
        chosen_parts(STATE_COMPONENTS, list(state), whose="an env runner's state")
        for name, pipeline in self._pipelines().items():
            if name in state:
                pipeline.set_state(state[name])
        if "rl_module" in state:
            version = int(state.get("weights_seq_no", 0))
            if version == 0 or version > self.weights_seq_no:
                self._load_modules(state["rl_module"])
                if version:
                    self.weights_seq_no = version
        if "num_env_steps_sampled_lifetime" in state:
            self._num_env_steps_lifetime_base = int(state["num_env_steps_sampled_lifetime"])
            self._num_env_steps_since_base = 0

    def _load_modules(self, states: Mapping[str, Any]) -> None:
        modules = dict(self.multi_rl_module.items())
        if not any(module_id in modules for module_id in states) and len(modules) == 1:
            states = {next(iter(modules)): states}
        for module_id, module_state in states.items():
            if module_id in modules:
                modules[module_id].set_state(module_state)

    # -- lifecycle -----------------------------------------------------------------------------

    def ping(self) -> str:
        """Return "pong"."""
        return "pong"

    def assert_healthy(self) -> None:
        """Raise an error if the runner has no module, or was stopped."""
        if self._is_stopped:
            raise ClosedError(f"Env runner {self.worker_index} was stopped.")
        if self.module is None:
            raise RuntimeError(f"Env runner {self.worker_index} has no module.")

    def interrupt(self) -> None:
        """Let a sampling call end with Interrupted before its next vector step, as do later ones.

        Any thread may call this. Afterwards the runner can only be stopped.
        """

        def end(*args: object, **kwargs: object) -> NoReturn:
            raise Interrupted

        for name in ("step", "step_sparse", "step_rows", "reset", "reset_sparse"):
            if hasattr(self.env, name):
                setattr(self.env, name, end)

    def stop(self) -> None:
        """Close the environments. Further calls do nothing; sampling raises ``ClosedError``."""
        self._is_stopped = True
        if self._recorder is not None:
            self._recorder.close()
        if hasattr(self.env, "close"):
            close_env(self.env, self.worker_index)
        self.env = None

    def __enter__(self) -> EnvRunner:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(worker_index={self.worker_index}, num_envs={self.num_envs})"


def _recorder_for(config: BaseConfig) -> EpisodeRecorder | None:
    """Return the recorder for a config's env runner; None if nothing is recorded."""
    if config.output is None or config.in_evaluation:
        return None
    return EpisodeRecorder(
        config.output,
        max_env_steps=config.output_max_rows_per_file,
        writes_unfinished=config.output_write_remaining_data,
        normalize_actions=config.normalize_actions,
    )
