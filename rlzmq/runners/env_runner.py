"""EnvRunner: samples episodes with an environment, a module and two connector pipelines.

This base class owns what all runners share: the vector env's lifecycle, the module, seeds, counters and metrics
(weights and states: EnvRunnerState). Subclasses own the sampling loop.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from rlzmq.config.base_config import BaseConfig
from rlzmq.connectors.defaults import change_modules
from rlzmq.core.callbacks import CallbackList
from rlzmq.core.errors import ClosedError, ConfigurationError
from rlzmq.core.metrics import MetricsLogger, ReducedMetrics
from rlzmq.core.seeding import derive_seed
from rlzmq.core.stage_timers import StageTimers
from rlzmq.envs.registry import EnvContext
from rlzmq.modules.multi_rl_module import MultiRLModule
from rlzmq.modules.output_check import check_acting_outputs
from rlzmq.runners.env_failures import EnvFailures, Reproduction, close_env
from rlzmq.runners.episode_metrics import EpisodeMetrics
from rlzmq.runners.runner_state import EnvRunnerState

__all__ = ["EnvRunner", "sample_limits"]


class EnvRunner(EnvRunnerState, abc.ABC):
    """Samples episodes with a module in environments.

    Args:
        config: An ``AlgorithmConfig``, or any object with its attributes. The runner keeps an unfrozen copy.
        worker_index: Index within the group, 1-based; 0 for the local runner. Seeds derive from it; the
            local runner draws the same numbers as runner 1, so that a serial run equals one with one runner
            process.
        incarnation: Number of restarts of this runner; each incarnation draws different random numbers.
        num_workers: Number of remote runners (default: ``config.num_env_runners``).

    Attributes:
        config: The runner's copy; to use another ``env_config``, change it and call ``make_env``.
        env: The vector env; may be wrapped or changed between calls.
        module: The module that acts (single-agent: an RLModule, multi-agent: a MultiRLModule).
        env_to_module, module_to_env: The connector pipelines.
        metrics: A MetricsLogger for callbacks and connector pieces.
        timers: Seconds per stage of the current sample call.
        weights_seq_no: The version of the weights in use, stored with each step.
        generator: The torch generator of all action sampling.
        env_watch: Notified before calls that may hang; by default a no-op.
    """

    def __init__(
        self,
        *,
        config: BaseConfig,
        worker_index: int = 0,
        incarnation: int = 0,
        num_workers: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.config = _own(config)
        self.worker_index = worker_index
        self.stream_index = max(worker_index, 1)
        self.incarnation = incarnation
        self.num_workers: int = (
            int(getattr(config, "num_env_runners", 0)) if num_workers is None else num_workers
        )
        self.num_envs: int = config.num_envs_per_env_runner
        self.seed: int | None = getattr(config, "seed", None)
        self.callbacks = CallbackList(config)
        self.metrics = MetricsLogger(stats_cls_lookup=getattr(config, "custom_stats_cls_lookup", None))
        self.episode_metrics = EpisodeMetrics(getattr(config, "metrics_num_episodes_for_smoothing", 100))
        self.timers = StageTimers()
        self.env_watch: Any = _Unwatched()
        self.env: Any = None
        self.module: Any = None
        self.multi_rl_module: Any = None
        self.env_to_module: Any = None
        self.module_to_env: Any = None
        self.weights_seq_no = 0
        self.weights_generation = 0
        self.generator = torch.Generator()
        if self.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(derive_seed(self.seed, "policy", self.stream_index, incarnation))
        self.num_env_failures = 0
        self._num_failures_in_a_row = 0
        self._failures = EnvFailures(self)
        self._num_env_steps_lifetime_base = 0
        self._num_env_steps_since_base = 0
        self._num_envs_made = 0
        self._weights_layout: Any = None
        self._synced_module_ids: list[str] | None = None
        self._last_sample_end: float | None = None
        self._is_stopped = False
        self.make_env()
        self.make_module()

    # -- sampling ------------------------------------------------------------------------------

    @abc.abstractmethod
    def sample(
        self,
        *,
        num_timesteps: int | None = None,
        num_episodes: int | None = None,
        explore: bool | None = None,
        random_actions: bool = False,
        force_reset: bool = False,
    ) -> Any:
        """Sample until enough steps or episodes are there.

        Args:
            num_timesteps: Minimum number of env steps (at most num_envs - 1 more); unfinished episodes
                are returned as chunks and continue in the next call.
            num_episodes: Exact number of whole episodes; all envs are reset first, and unfinished episodes are
                discarded. At most one of the two may be given; with neither, sample a fragment
                (``config.batch_mode`` "truncate_episodes") or num_envs episodes ("complete_episodes").
            explore: Sample from the exploration distribution, else act greedily (default:
                ``config.explore``).
            random_actions: Sample actions from the action space, without the module.
            force_reset: Reset all envs first.

        Returns:
            A sequence of episodes: finished ones in order of finishing, then ongoing chunks by env index.

        Raises:
            AssertionError: Both counts are given, or one is negative.
            EnvironmentError_: An environment raised and could not, or must not, be recreated.
            ClosedError: The runner was stopped.
        """

    @abc.abstractmethod
    def sample_lease(
        self, num_vector_steps: int, *, max_env_steps: int | None = None, max_s: float | None = None
    ) -> Any:
        """Sample ``num_vector_steps`` vector steps, continuing the ongoing episodes.

        The trajectories depend only on the total number of vector steps, not on how they are split into calls.

        Args:
            num_vector_steps: At least 1.
            max_env_steps: Stop after the vector step that reaches this number of env steps.
            max_s: Stop after the vector step that reaches this number of seconds.

        Returns:
            An EpisodeBatch whose columns have ``num_envs * (lookback + num_vector_steps + 1)`` slots, even if
            sampling stopped early; its ``meta`` has num_env_steps, num_vector_steps, weights_version,
            weights_generation and episode_metrics (lists of returns, lengths and durations_s of the
            episodes that finished).
        """

    @abc.abstractmethod
    def _make_vector_env(self, context: EnvContext) -> Any:
        """Make and return the vector env; defined by subclasses."""

    @abc.abstractmethod
    def _make_pipelines(self) -> None:
        """Build ``env_to_module`` and ``module_to_env`` and choose the sampler."""

    @abc.abstractmethod
    def get_spaces(self) -> dict[str, tuple[Any, Any]]:
        """Spaces by name.

        Returns:
            ``{"__env__": (obs, act) of the vector env, "__env_single__": (obs, act) of one env,
            module_id: (obs after the env-to-module pipeline, act)}``.
        """

    @abc.abstractmethod
    def _acting_module(self) -> Any:
        """Return the acting module of ``multi_rl_module``: the value of ``module``."""

    def _drop_unfinished_episodes(self) -> None:
        """Drop unfinished episodes; the next sample resets all envs, whose random generators continue."""
        sampler = getattr(self, "_sampler", None)
        if sampler is not None:
            sampler.forget()

    @abc.abstractmethod
    def _forget_episodes(self) -> None:
        """Drop unfinished episodes; the next sample resets all envs."""

    # -- environment ---------------------------------------------------------------------------

    def make_env(self) -> None:
        """Recreate the vector env, e.g. after ``config.env_config`` was changed; the old one is closed.

        Unfinished episodes are dropped, and the next ``sample`` begins with a reset.
        """
        if self.env is not None:
            close_env(self.env, self.worker_index)
            self.env = None
        self._forget_episodes()
        self.remake_env()

    def remake_env(self) -> Any:
        """Replace a vector env that failed; the ongoing sample call continues with the new one."""
        context = EnvContext(
            getattr(self.config, "env_config", None) or {},
            worker_index=self.worker_index,
            num_workers=self.num_workers,
            recreated_worker=self.incarnation > 0,
        )
        self._num_envs_made += 1
        with self.env_watch.work(is_reset=True):
            self.env = self._make_vector_env(context)
        self.env_watch.attend(self.env)
        if self.callbacks.has("on_environment_created"):
            self.callbacks.call(
                "on_environment_created",
                env_runner=self,
                metrics_logger=self.metrics,
                env=self.env,
                env_context=context,
            )
        return self.env

    def env_seed(self, *coordinates: int) -> int | None:
        """Return the seed of the vector env's first reset (or of a recreated part); None without a run seed."""
        if self.seed is None:
            return None
        return derive_seed(
            self.seed, "env", self.stream_index, self.incarnation, self._num_envs_made, *coordinates
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

    def count_env_failure(
        self, error: BaseException, env_index: int | None, where: str, way: Reproduction | None = None
    ) -> None:
        """Count an environment's exception; return if the environment is to be recreated, else raise.

        Args:
            error: What the environment raised.
            env_index: Index of the environment; None if it is not known.
            where: "step" or "reset".
            way: The reset and actions that led to it, if known.

        Raises:
            EnvironmentError_: ``config.restart_failed_sub_environments`` is off, or there were more failures
                in a row than ``config.num_consecutive_env_runner_failures_tolerance``, or in 60 s than
                ``config.env_failures_per_minute_tolerance``; from ``error``, with `way` as its ``way_there``.
        """
        self._failures.count(error, env_index, where, way)

    def forget_env_failures(self) -> None:
        """Reset the count of failures in a row, after an episode ended normally."""
        self._num_failures_in_a_row = 0

    # -- module and weights --------------------------------------------------------------------

    def make_module(self) -> None:
        """Build the pipelines and the inference-only module from the config, with fresh weights."""
        self._make_pipelines()
        spec = self.config.get_multi_rl_module_spec(
            env=self.env, spaces=self.get_spaces(), inference_only=True
        )
        self.multi_rl_module = spec.build(seed=self.seed)
        self._check_outputs(self.multi_rl_module.keys())
        if hasattr(self.multi_rl_module, "eval"):
            self.multi_rl_module.eval()
        self._weights_layout = None
        self.module = self._acting_module()

    def _check_outputs(self, module_ids: Iterable[str]) -> None:
        modules = self.multi_rl_module
        if (
            type(modules)._forward_exploration is MultiRLModule._forward_exploration
        ):  # the modules share nothing
            for module_id in module_ids:
                check_acting_outputs(modules[module_id])

    def change_modules(self, config: BaseConfig, synced_module_ids: list[str] | None = None) -> None:
        """Replace the set of modules, between two samples.

        New modules are built with weights from the seed or their spec; modules that remain keep theirs. Ongoing
        episodes continue with the modules that their agents were mapped to; if one of those was removed, unfinished
        episodes are dropped. The envs keep the settings of the runner's own config.

        Args:
            config: The config with the new modules.
            synced_module_ids: Modules whose weights `set_weights` provides; None: all.
        """
        before, self.config = self.config, _own(config)
        if self.config is not config:
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
                self._check_outputs([module_id])
        self._synced_module_ids = synced_module_ids
        self._weights_layout = None
        if gone:
            self._drop_unfinished_episodes()

    # -- counters and metrics ------------------------------------------------------------------

    @property
    def num_env_steps_sampled(self) -> int:
        """Lifetime env steps of this runner."""
        return self.episode_metrics.num_env_steps_lifetime

    @property
    def global_env_steps(self) -> int:
        """Estimate of all runners' lifetime env steps, passed to modules as ``t`` for exploration schedules."""
        runners = max(self.num_workers, 1)
        return (self._num_env_steps_lifetime_base // runners + self._num_env_steps_since_base) * runners

    def get_metrics(self) -> ReducedMetrics:
        """Return the metrics since the last call under RLlib's keys, and the values that callbacks logged.

        ``algorithm.metrics.aggregate([runner.get_metrics(), …], key="env_runners")`` adds them to a run's results.
        """
        states = self.episode_metrics.states()
        result = self.episode_metrics.reduce()
        result["weights_seq_no"] = self.weights_seq_no
        if self.num_env_failures:
            result["num_env_failures_lifetime"] = self.num_env_failures
        logged = self.metrics.compile()
        result.update(logged)
        return ReducedMetrics(result, {**states, **logged.states})

    def _count_steps(
        self, num_env_steps: int, agent_steps: Mapping[str, int], module_steps: Mapping[str, int]
    ) -> None:
        self._num_env_steps_since_base += num_env_steps
        self.episode_metrics.add_steps(num_env_steps, agent_steps, module_steps)

    def _time_sample(self, start_s: float) -> dict[str, list[float]]:
        """Finish timing a sample call that began at ``start_s``; return the timers since the last one."""
        timers = self.timers
        if self._last_sample_end is not None:
            timers.add("time_between_sampling", start_s - self._last_sample_end)
        self._last_sample_end = time.perf_counter()
        timers.add("sample", self._last_sample_end - start_s)
        for name, pipeline in self._pipelines().items():
            if pipeline is not None:
                timers.add_pieces(pipeline, f"{name}/")
        sums = timers.take()
        self.episode_metrics.timers.merge(sums)
        return sums

    # -- lifecycle -----------------------------------------------------------------------------

    def ping(self) -> str:
        """Answer "pong"."""
        return "pong"

    def assert_healthy(self) -> None:
        """Raise if the runner has no env or no module, or was stopped."""
        self._assert_running()
        if self.env is None or self.module is None:
            raise RuntimeError(f"Env runner {self.worker_index} has no environment or no module.")

    def stop(self) -> None:
        """Close the environments. Further calls do nothing; sampling raises ``ClosedError``."""
        self._is_stopped = True
        if self.env is not None:
            close_env(self.env, self.worker_index)
            self.env = None

    def _assert_running(self) -> None:
        if self._is_stopped:
            raise ClosedError(f"Env runner {self.worker_index} was stopped: create a new one to sample.")

    def __enter__(self) -> EnvRunner:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(worker_index={self.worker_index}, num_envs={self.num_envs})"


class _Unwatched:
    """A no-op in place of `rlzmq.roles.runner.env_watchdog.EnvWatch`."""

    def work(self, *, is_reset: bool = False) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def attend(self, env: Any) -> None:
        pass


def _own(config: BaseConfig) -> Any:
    """Return a copy that may be changed; a config that cannot be copied is returned as it is."""
    copy = getattr(config, "copy", None)
    return config if copy is None else copy(copy_frozen=False)


def sample_limits(
    config: BaseConfig, num_envs: int, worker_index: int, num_timesteps: int | None, num_episodes: int | None
) -> tuple[int | None, int | None]:
    """Return (num_timesteps, num_episodes) for ``sample``; exactly one of them is not None.

    Raises:
        AssertionError: Both are given, or one is negative.
    """
    if num_timesteps is not None and num_episodes is not None:
        raise AssertionError("sample(): give num_timesteps or num_episodes, not both.")
    for name, value in (("num_timesteps", num_timesteps), ("num_episodes", num_episodes)):
        if value is not None and value < 0:
            raise AssertionError(f"sample({name}={value}): expected a number >= 0.")
    if num_timesteps is None and num_episodes is None:
        if config.batch_mode == "complete_episodes":
            return None, num_envs
        return config.get_rollout_fragment_length(worker_index) * num_envs, None
    return num_timesteps, num_episodes
