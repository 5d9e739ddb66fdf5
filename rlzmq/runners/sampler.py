"""Sampler: the loop of an env runner, vector step after vector step.

Per vector step: modules -> module-to-env pipeline -> env step -> episodes -> env-to-module pipeline. A subclass decides
what an episode is meanwhile: `RowsSampler` writes rows of columns (one agent), `EpisodeSampler` has an object per
ongoing episode, for connector pieces and callbacks that need one, and `AgentsRowsSampler` is its form on rows for
several agents. All of them give identical numbers.
"""

from __future__ import annotations

import abc
import logging
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rlzmq.core.metrics import (
    ENV_STEP_TIMER,
    ENV_TO_MODULE_TIMER,
    INFERENCE_TIMER,
    MODULE_TO_ENV_TIMER,
    VECTOR_STEPS_TIMER,
)
from rlzmq.runners.episode_metrics import HOW_TO_LIMIT, FinishedEpisodes

if TYPE_CHECKING:
    from rlzmq.runners.env_runner import EnvRunner

__all__ = ["SampleRequest", "Sampler"]

_log = logging.getLogger("rlzmq.runners")

# Reading the clock at every step would cost native vector envs 1 % of their speed: of so many vector
# steps (a power of two) one is timed.
_STEPS_PER_TIMED = 16

_ENDLESS_S, _ENDLESS_AGAIN = 10.0, 6.0  # until the first warning; the next one comes after six times as long


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


class Sampler(abc.ABC):
    """Samples fragments of the runner's environments; episodes continue from one fragment to the next.

    Args:
        runner: Provides the env, modules, pipelines, callbacks and counters.
        lookback: Number of steps before each chunk that its columns include.

    Attributes:
        stepper: Resets and steps the vector env.
        has_episodes: Whether unfinished episodes can be continued. If not, call `reset` before `run`.
        random_actions: Whether the unfinished episodes have random actions. They continue with such only: all steps of
            an episode have the same columns.
    """

    def __init__(self, runner: EnvRunner, lookback: int) -> None:
        self.runner = runner
        self.num_envs: int = runner.num_envs
        self.lookback = lookback
        self.has_episodes: bool = False
        self.random_actions: bool = False
        self.stepper: Any = runner.make_stepper()
        self._counts_agent_steps = runner.config.count_steps_by == "agent_steps"
        self._num_steps_ever = 0
        # Of the current fragment: vector steps, env steps, agent steps, ended episodes.
        self._num_steps = self._num_env_steps = self._num_agent_steps = self._num_ends = 0

    @property
    def env(self) -> Any:
        """The vector env to step."""
        return self.stepper.env

    def forget(self) -> None:
        """Drop the unfinished episodes."""
        self.has_episodes = False

    def run(self, request: SampleRequest) -> tuple[Any, FinishedEpisodes, int]:
        """Sample what ``request`` asks for, and continue the ongoing episodes.

        Returns:
            The chunks: finished ones in the order of finishing, then ongoing ones by env; statistics of the ended
            episodes; the number of vector steps made.
        """
        runner, timers, clock = self.runner, self.runner.timers, time.perf_counter
        self._request = request
        self.random_actions = request.random_actions
        self._finished = FinishedEpisodes()
        self._num_steps = self._num_env_steps = self._num_agent_steps = self._num_ends = 0
        self._begin_s = self._warned_s = clock()
        self._begin_fragment()
        env_steps_before, num_workers = runner.global_env_steps, max(runner.num_workers, 1)
        num_steps_ever, inference_mode = self._num_steps_ever, torch.inference_mode()
        most_per_vector_step = sys.maxsize if self._counts_agent_steps else self.num_envs
        loop_s = clock()
        while num_more := request.num_more_vector_steps(
            self._num_steps,
            self._num_agent_steps if self._counts_agent_steps else self._num_env_steps,
            self._num_ends,
            most_per_vector_step,
        ):
            if request.num_episodes is not None and not self._num_ends:
                self._warn_if_endless()
            for _ in range(num_more):
                timed = not (num_steps_ever + self._num_steps) & (_STEPS_PER_TIMED - 1)
                if timed:
                    begin_s = inferred_s = clock()
                if request.random_actions:
                    actions = self._random_actions()
                else:
                    with inference_mode:
                        outputs = self._infer(env_steps_before + self._num_env_steps * num_workers)
                    if timed:
                        inferred_s = clock()
                    actions = self._to_env(outputs)
                if timed:
                    acted_s = clock()
                results = self._step(actions)
                if timed:
                    stepped_s = clock()
                self._add(results)
                if timed:
                    timers.add_stage(INFERENCE_TIMER, begin_s, inferred_s)
                    timers.add_stage(MODULE_TO_ENV_TIMER, inferred_s, acted_s)
                    timers.add_stage(ENV_STEP_TIMER, acted_s, stepped_s)
                    timers.add_stage(ENV_TO_MODULE_TIMER, stepped_s, clock())
                self._note_ends()
                self._num_steps += 1
        self._num_steps_ever += self._num_steps
        timers.add(VECTOR_STEPS_TIMER, clock() - loop_s)
        return self._finish(), self._finished, self._num_steps

    def _warn_if_endless(self) -> None:
        """Log a warning if a request for whole episodes has seen none end for long."""
        now_s = time.perf_counter()
        config, waited_s = self.runner.config, now_s - self._begin_s
        limit_s = _ENDLESS_S
        if config.in_evaluation and config.evaluation_sample_timeout_s is not None:
            limit_s = min(limit_s, config.evaluation_sample_timeout_s)
        if self._warned_s > self._begin_s:
            limit_s = _ENDLESS_AGAIN * (self._warned_s - self._begin_s)
        # One of several runners says it; those of an evaluation count from 1,000,001.
        if waited_s >= limit_s and self.runner.worker_index % 1_000_000 <= 1:
            self._warned_s = now_s
            _log.warning(
                "No episode has ended in %d env steps, %.0f s. If episodes never end, limit them: %s.",
                self._num_env_steps,
                waited_s,
                HOW_TO_LIMIT,
            )

    # -- defined by subclasses -----------------------------------------------------------------

    @abc.abstractmethod
    def reset(self) -> None:
        """Reset all environments and begin an episode in each."""

    @abc.abstractmethod
    def _begin_fragment(self) -> None:
        """Prepare for the first vector step of a fragment."""

    @abc.abstractmethod
    def _infer(self, t: int) -> Any:
        """Return the modules' outputs; `t` counts the run's env steps, for exploration schedules."""

    @abc.abstractmethod
    def _to_env(self, outputs: Any) -> Any:
        """Store the modules' outputs as the next step's; return the vector env's actions."""

    @abc.abstractmethod
    def _random_actions(self) -> Any:
        """Store random actions as the next step's; return them."""

    @abc.abstractmethod
    def _step(self, actions: Any) -> Any:
        """Step the vector env; return what `_add` takes."""

    @abc.abstractmethod
    def _add(self, results: Any) -> None:
        """Add a vector step's results to the episodes, and turn the observations into the modules' next inputs."""

    @abc.abstractmethod
    def _note_ends(self) -> None:
        """Count the episodes that this vector step has ended, and prepare for their successors."""

    @abc.abstractmethod
    def _finish(self) -> Any:
        """Return the fragment's chunks; the ongoing episodes continue in new ones."""
