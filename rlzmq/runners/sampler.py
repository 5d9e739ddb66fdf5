"""Sampler: the interface between an env runner and its sampling loops. EpisodicSampler: the loop over episodes."""

from __future__ import annotations

import abc
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rlzmq.core.metrics import ENV_STEP_TIMER
from rlzmq.envs.observation_check import check_agents_observations
from rlzmq.runners.episode_metrics import EpisodeTotals, FinishedEpisodes

if TYPE_CHECKING:
    from rlzmq.runners.env_runner import EnvRunner, SampleRequest

__all__ = ["WEIGHTS_SEQ_NO", "EpisodicSampler", "Sampler"]

WEIGHTS_SEQ_NO = "weights_seq_no"
"""Column with the version of the weights with which each step was sampled."""


class Sampler(abc.ABC):
    """Samples fragments of the runner's environments; episodes continue from one fragment to the next.

    Args:
        runner: Provides the env, modules, pipelines, callbacks and counters.
        lookback: Number of steps before each chunk that its columns include.

    Attributes:
        stepper: Resets and steps the vector env.
        has_episodes: Whether unfinished episodes can be continued. If not, call `reset` before `run`.
    """

    def __init__(self, runner: EnvRunner, lookback: int) -> None:
        self.runner = runner
        self.num_envs: int = runner.num_envs
        self.lookback = lookback
        self.has_episodes: bool = False
        self.stepper: Any = runner.make_stepper()

    @property
    def env(self) -> Any:
        """The vector env to step."""
        return self.stepper.env

    def forget(self) -> None:
        """Drop the unfinished episodes."""
        self.has_episodes = False

    @abc.abstractmethod
    def reset(self) -> None:
        """Reset all environments and begin an episode in each."""

    @abc.abstractmethod
    def run(self, request: SampleRequest) -> tuple[Any, FinishedEpisodes, int]:
        """Sample what ``request`` asks for, and continue the ongoing episodes.

        Returns:
            The chunks: finished ones in the order of finishing, then ongoing ones by env; statistics of the ended
            episodes; the number of vector steps made.
        """


class _Ended(NamedTuple):
    """An episode that ended in the current fragment; `episode` is its last chunk."""

    last_step: int
    env_index: int
    totals: EpisodeTotals
    num_env_steps: int
    duration_s: float
    episode: Any


class EpisodicSampler(Sampler):
    """The loop of the samplers with one object per ongoing episode.

    Per vector step: act -> env step -> each episode grows -> observe -> ended episodes are replaced. The next step of
    an environment resets an episode that was not reset yet.
    """

    def __init__(self, runner: EnvRunner, lookback: int) -> None:
        super().__init__(runner, lookback)
        self._counts_agent_steps = getattr(runner.config, "count_steps_by", "env_steps") == "agent_steps"
        self._to_reset: set[int] = set()  # envs whose next step is a reset
        self._has_step_hooks = not {"on_episode_step", "on_episode_start"}.isdisjoint(runner.callbacks.hooks)

    # -- defined by subclasses -----------------------------------------------------------------

    @abc.abstractmethod
    def _new_episode(self, index: int) -> Any:
        """Return a new episode of env ``index``, not reset yet."""

    @abc.abstractmethod
    def _begin(self, episode: Any, observation: Any, info: Any) -> None:
        """Add the return value of an environment's reset."""

    @abc.abstractmethod
    def _act(self, t: int) -> tuple[Any, Sequence[Any]]:
        """Return the vector env's actions, and for each env the act that `_grow` needs."""

    @abc.abstractmethod
    def _random_actions(self) -> tuple[Any, Sequence[Any]]:
        """Return random actions in the form of `_act`; the modules' states do not change."""

    @abc.abstractmethod
    def _grow(self, index: int, episode: Any, act: Any, row: tuple[Any, ...]) -> int:
        """Add an env step; return the number of agent steps completed (0 if they are not counted).

        Set ``_has_ended`` if the episode is over.

        Args:
            index: Index of the env.
            episode: Its episode.
            act: Result of `_act` or `_random_actions`.
            row: Observation, reward, terminated, truncated and info (multi-agent: dicts by agent id).
        """

    @abc.abstractmethod
    def _observe(self) -> None:
        """Turn the episodes' last observations into the modules' next inputs."""

    @abc.abstractmethod
    def _returns(self, episode: Any) -> tuple[Mapping[Any, float], Mapping[Any, str]]:
        """Return the chunk's return by agent id, and module ids by agent id where these are counted."""

    @abc.abstractmethod
    def _truncate(self, episode: Any) -> None:
        """End an episode after its environment failed."""

    @abc.abstractmethod
    def _batch(self, chunks: list[tuple[int, Any]], ongoing: list[tuple[int, Any]]) -> object:
        """Return a batch of (env index, episode) chunks and ongoing chunks; begin new chunks for the latter."""

    @abc.abstractmethod
    def _length(self, episode: Any) -> int:
        """Return the env steps of the whole episode so far."""

    @abc.abstractmethod
    def _begin_fragment(self) -> None:
        """Prepare for the first vector step of a fragment."""

    # -- the loop ------------------------------------------------------------------------------

    def reset(self) -> None:
        self._episodes = [self._new_episode(index) for index in range(self.num_envs)]
        self._totals = [EpisodeTotals() for _ in range(self.num_envs)]
        self._starting = set(range(self.num_envs))
        self._observations, infos = self.stepper.reset_rows(self.runner.take_reset_seed())
        for episode, observation, info in zip(self._episodes, self._observations, infos, strict=True):
            self._begin(episode, observation, info)
        self._to_reset.clear()
        self.has_episodes = True

    def run(self, request: SampleRequest) -> tuple[Any, FinishedEpisodes, int]:
        runner = self.runner
        self._request = request
        self._ended: list[_Ended] = []
        self._num_done = self._num_steps = self._num_agent_steps = num_env_steps = 0
        counts_agent_steps = self._counts_agent_steps and request.num_timesteps is not None
        self._begin_fragment()
        while request.num_more_vector_steps(
            self._num_steps,
            self._num_agent_steps if counts_agent_steps else num_env_steps,
            self._num_done,
            self.num_envs,
            1,
        ):
            if request.num_episodes is not None and not self._num_done:
                runner.wait_for_ends(num_env_steps)
            t = runner.global_env_steps + num_env_steps * max(runner.num_workers, 1)
            actions, acts = self._random_actions() if request.random_actions else self._act(t)
            start_s = time.perf_counter()
            rows = self.stepper.step_rows(actions)
            runner.timers.add_stage(ENV_STEP_TIMER, start_s, time.perf_counter())
            num_env_steps += self._add_step(rows, acts)
            self._observe()
            self._replace_done()
            self._num_steps += 1
        return *self._collect(), self._num_steps

    def _add_step(self, rows: Sequence[tuple[Any, ...]], acts: Sequence[Any]) -> int:
        """Add the envs' results to the episodes; return the number of env steps."""
        self._observations = [row[0] for row in rows]
        self._starting = set()
        self._has_ended = False
        for index in self.stepper.source.failed:
            self._restart_failed(index)
        to_reset = self._to_reset
        grow = self._grow
        for index, (episode, act, row) in enumerate(zip(self._episodes, acts, rows, strict=True)):
            if index in to_reset:
                self._begin(episode, row[0], row[4])
                self._totals[index] = EpisodeTotals()
                self._starting.add(index)
            else:
                self._num_agent_steps += grow(index, episode, act, row)
        to_reset.clear()
        return self.num_envs - len(self._starting)

    def _check_agents(self) -> None:
        """Raise an error for last observations of multi-agent environments that do not fit their agents' spaces."""
        observed = [
            (episode.id_, episode.env_t, own)
            for episode, own in zip(self._episodes, self._observations, strict=True)
        ]
        check_agents_observations(observed, self.env.single_observation_spaces.spaces)

    def _restart_failed(self, index: int) -> None:
        """Truncate the episode of env ``index``, which was recreated, before this step."""
        episode = self._episodes[index]
        if not episode.is_reset:
            return  # it failed at its reset, so the episode has not begun yet
        if self._length(episode):
            self._truncate(episode)
            self._finish_episode(index, episode, self._num_steps - 1)
        self._begin_episode(index)

    def _replace_done(self) -> None:
        """Run the callbacks of ended episodes and begin their successors."""
        if not (self._has_ended or self._has_step_hooks):
            return
        for index, episode in enumerate(self._episodes):
            if self._has_step_hooks:
                self._call(
                    "on_episode_start" if index in self._starting else "on_episode_step", episode, index
                )
            if episode.is_done:
                self.runner.forget_env_failures()
                self._finish_episode(index, episode, self._num_steps)
                if self._request.num_episodes is not None and self._num_done >= self._request.num_episodes:
                    return
                self._begin_episode(index)

    def _begin_episode(self, index: int) -> None:
        """Continue env ``index`` with a new episode, which begins with the env's reset."""
        self._episodes[index] = self._new_episode(index)
        self._totals[index] = EpisodeTotals()
        self._to_reset.add(index)

    def _finish_episode(self, index: int, episode: Any, last_step: int) -> None:
        totals = self._totals[index]
        totals.add(*self._returns(episode))
        duration_s = time.perf_counter() - totals.started_s
        self._ended.append(_Ended(last_step, index, totals, self._length(episode), duration_s, episode))
        self._num_done += len(episode) > 0

    def _collect(self) -> tuple[Any, FinishedEpisodes]:
        """Return finished episodes, then ongoing chunks; the episodes continue in new chunks."""
        num_episodes, finished = self._request.num_episodes, FinishedEpisodes()
        self._ended.sort(key=lambda entry: entry[:2])  # a failure is noticed one step late
        for entry in self._ended[:num_episodes]:
            finished.add(entry.totals, entry.num_env_steps, entry.duration_s)
        chunks = [(entry.env_index, entry.episode) for entry in self._ended if len(entry.episode)]
        if num_episodes is not None:
            self.forget()
            return self._batch(chunks[:num_episodes], []), finished
        ongoing = [(index, episode) for index, episode in enumerate(self._episodes) if len(episode)]
        for index, episode in ongoing:
            self._totals[index].add(*self._returns(episode))
        return self._batch(chunks, ongoing), finished

    def _call(self, hook: str, episode: object, index: int, **more: object) -> None:
        """Run a callback with an episode of env ``index``."""
        runner = self.runner
        if hook in runner.callbacks.hooks:
            runner.callbacks.call(
                hook,
                episode=episode,
                env_runner=runner,
                metrics_logger=runner.metrics,
                env=runner.env,
                env_index=index,
                rl_module=runner.module,
                **more,
            )
