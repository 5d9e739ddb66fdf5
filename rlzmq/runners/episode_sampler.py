"""EpisodeSampler: has an object per ongoing episode; a store decides what it holds, and how modules act on it.

`EpisodeObjects` holds the episodes that connector pieces and callbacks get, of one agent or of several. `AgentRows`
(`rlzmq.runners.agent_rows`) holds row numbers of several agents.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.tree import tree_map, tree_stack
from rlzmq.episodes.columns import DEFAULT_AGENT_ID, Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.runners.episode_metrics import EpisodeTotals, length_of, recorded_return, returns_of
from rlzmq.runners.module_step import ModuleStep, initial_row
from rlzmq.runners.sampler import Sampler

if TYPE_CHECKING:
    from rlzmq.runners.agent_rows import AgentRows
    from rlzmq.runners.env_runner import EnvRunner

__all__ = ["EpisodeObjects", "EpisodeSampler"]


class _Ended(NamedTuple):
    """An episode that ended in the current fragment; `episode` is its last chunk."""

    last_step: int
    env_index: int
    totals: EpisodeTotals
    duration_s: float
    episode: Any


class EpisodeSampler(Sampler):
    """Samples with an object per ongoing episode, of one agent or of several.

    Per vector step, each episode grows, the modules' next inputs are made from all episodes, and ended ones are
    replaced; the next step of their environment resets the new ones.

    Args:
        runner: See `Sampler`.
        make_store: Called with the runner and the stepper; decides what the episodes hold, and how modules act on it.
    """

    def __init__(
        self, runner: EnvRunner, make_store: Callable[[EnvRunner, Any], EpisodeObjects | AgentRows]
    ) -> None:
        super().__init__(runner, runner.config.episode_lookback_horizon)
        self._store = make_store(runner, self.stepper)
        self._acts: Sequence[Any] = ()
        self._has_step_hooks = not {"on_episode_step", "on_episode_start"}.isdisjoint(runner.callbacks.hooks)
        self._to_reset: set[int] = set()  # envs whose next step is a reset

    def reset(self) -> None:
        self._store.clear()
        self._prev_chunks: list[list[Any]] = [[] for _ in range(self.num_envs)]
        self._episodes = [self._new_episode(index) for index in range(self.num_envs)]
        self._totals = [EpisodeTotals() for _ in range(self.num_envs)]
        self._starting = set(range(self.num_envs))
        self._observations, infos = self.stepper.reset_rows(self.runner.take_reset_seed())
        for episode, observation, info in zip(self._episodes, self._observations, infos, strict=True):
            self._store.begin(episode, observation, info)
        self._to_reset.clear()
        self._is_observed = False
        self.has_episodes = True

    def _new_episode(self, index: int) -> Any:
        """Return a new episode of env ``index``, not reset yet."""
        episode = self._store.new_episode()
        self._call("on_episode_created", episode, index)
        return episode

    # -- a vector step -------------------------------------------------------------------------

    def _begin_fragment(self) -> None:
        self._ended: list[_Ended] = []
        self._store.begin_fragment(explore=self._request.explore)
        if not self._is_observed:
            self._store.observe(self._episodes, self._observations)
            self._is_observed = True
            for index in sorted(self._starting):
                self._call("on_episode_start", self._episodes[index], index)

    def _infer(self, t: int) -> object:
        return self._store.infer(t)

    def _to_env(self, outputs: Any) -> object:
        actions, self._acts = self._store.acts(outputs)
        return actions

    def _random_actions(self) -> object:
        actions, self._acts = self._store.random_acts(self._episodes)
        return actions

    def _step(self, actions: object) -> Sequence[tuple[Any, ...]]:
        rows: Sequence[tuple[Any, ...]] = self.stepper.step_rows(actions)
        return rows

    def _add(self, results: Sequence[tuple[Any, ...]]) -> None:
        self._starting = set()
        self._has_ended = False
        for index in self.stepper.source.failed:
            self._restart_failed(index)
        to_reset, store = self._to_reset, self._store
        for index, (episode, act, row) in enumerate(zip(self._episodes, self._acts, results, strict=True)):
            if index in to_reset:
                store.begin(episode, row[0], row[4])
                self._totals[index] = EpisodeTotals()
                self._starting.add(index)
                continue
            self._num_agent_steps += store.grow(index, episode, act, row)
            self._has_ended = self._has_ended or episode.is_done
        to_reset.clear()
        self._num_env_steps += self.num_envs - len(self._starting)
        store.observe(self._episodes, [row[0] for row in results])

    def _restart_failed(self, index: int) -> None:
        """Truncate the episode of env ``index``, which was recreated, before this step."""
        episode = self._episodes[index]
        if not episode.is_reset:
            return  # it failed at its reset, so the episode has not begun yet
        if length_of(episode):
            episode.truncate()
            self._finish_episode(index, episode, self._num_steps - 1)
        self._begin_episode(index)

    def _note_ends(self) -> None:
        if not (self._has_ended or self._has_step_hooks):
            return
        for index, episode in enumerate(self._episodes):
            if self._has_step_hooks:
                self._call(
                    "on_episode_start" if index in self._starting else "on_episode_step", episode, index
                )
            if episode.is_done:
                self.runner.failures.num_in_a_row = 0
                self._finish_episode(index, episode, self._num_steps)
                if self._request.num_episodes is not None and self._num_ends >= self._request.num_episodes:
                    return
                self._begin_episode(index)

    def _begin_episode(self, index: int) -> None:
        """Continue env ``index`` with a new episode, which begins with the env's reset."""
        self._episodes[index] = self._new_episode(index)
        self._totals[index] = EpisodeTotals()
        self._to_reset.add(index)
        self._prev_chunks[index] = []

    def _finish_episode(self, index: int, episode: Any, last_step: int) -> None:
        self._call("on_episode_end", episode, index, prev_episode_chunks=self._prev_chunks[index])
        totals = self._totals[index]
        totals.add(*returns_of(episode))
        infos = episode.get_infos(-1) if isinstance(episode, SingleAgentEpisode) and len(episode) else {}
        if (recorded := recorded_return(infos)) is not None:
            totals.agent_returns[DEFAULT_AGENT_ID] = recorded
        duration_s = time.perf_counter() - totals.started_s
        self._ended.append(_Ended(last_step, index, totals, duration_s, episode))
        self._num_ends += len(episode) > 0

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

    # -- the result ----------------------------------------------------------------------------

    def _finish(self) -> EpisodeBatch:
        num_episodes = self._request.num_episodes
        self._ended.sort(key=lambda entry: entry[:2])  # a failure is noticed one step late
        for entry in self._ended[:num_episodes]:
            self._finished.add(entry.totals, length_of(entry.episode), entry.duration_s)
        chunks = [(entry.env_index, entry.episode) for entry in self._ended if len(entry.episode)]
        if num_episodes is not None:
            self.forget()
            return self._store.collect(chunks[:num_episodes], [], self.lookback)
        for index, episode in enumerate(self._episodes):
            if len(episode):
                self._totals[index].add(*returns_of(episode))
                if "on_episode_end" in self.runner.callbacks.hooks:
                    self._prev_chunks[index].append(episode)
        return self._store.collect(chunks, self._episodes, self.lookback)


class EpisodeObjects:
    """SingleAgentEpisodes or MultiAgentEpisodes, for pieces and callbacks that get these.

    Args:
        runner: Provides the modules and pipelines.
        stepper: Makes the episodes; see `VectorStepper.new_episode`, `begin` and `grow`.
        acts_on_columns: Whether the default pieces (and the module-to-env pipeline) may run on whole columns, if only
            the user's env-to-module pieces need episodes.
    """

    def __init__(self, runner: EnvRunner, stepper: Any, *, acts_on_columns: bool = False) -> None:
        self._runner, self._stepper = runner, stepper
        self.new_episode, self.begin, self.grow = stepper.new_episode, stepper.begin, stepper.grow
        self._own_lookback = runner.env_to_module.required_lookback
        self._num_user_pieces = runner.env_to_module.num_own_pieces if acts_on_columns else None
        self._normalize = runner.module_to_env.normalize
        self._module_step = ModuleStep(runner.module, runner.generator)

    def clear(self) -> None:
        """Forget all episodes."""
        self._acting: list[Any] = []  # those that the module's inputs are of; done ones among them

    def begin_fragment(self, *, explore: bool) -> None:
        """Prepare for a fragment's first actions."""
        self._explore = explore
        self._module_step.begin(explore=explore)

    def observe(self, episodes: Sequence[Any], observations: Sequence[Any]) -> None:
        """Make the module's next inputs from the last observations, which the episodes have."""
        self._stepper.check(episodes, observations)
        timers = self._runner.timers
        self._acting = list(episodes)
        num_steps = sum(map(len, self._acting))  # no piece changes it
        timers.add("env_to_module_sum_episodes_length_in", num_steps)
        pipeline, arguments = self._runner.env_to_module, self._pipeline_arguments()
        # The module's next inputs: what the pipeline made, or only observations if its default pieces do not run.
        self._to_module: dict[str, Any] | None = None
        if self._num_user_pieces is None:
            self._to_module = pipeline(batch={}, **arguments)
        elif batch := pipeline.run_pieces(0, self._num_user_pieces, batch={}, **arguments):
            # A piece added columns, and the default pieces do the rest.
            num_pieces = len(pipeline.connectors)
            self._to_module = pipeline.run_pieces(self._num_user_pieces, num_pieces, batch=batch, **arguments)
        else:
            self._module_observations = tree_stack([episode.observations.get(-1) for episode in self._acting])
        timers.add("env_to_module_sum_episodes_length_out", num_steps)

    def _pipeline_arguments(self) -> dict[str, Any]:
        runner = self._runner
        return {
            "rl_module": runner.module,
            "episodes": self._acting,
            "explore": self._explore,
            "shared_data": runner.shared_data,
            "metrics": runner.metrics,
        }

    def infer(self, t: int) -> Any:
        """Return the modules' outputs; see `Sampler`."""
        if self._to_module is None:
            return self._module_step(self._module_observations, self._states(), t)[0]
        if not self._to_module:
            if any(map(_acts, self._acting)):
                self._blame_for(Columns.OBS)
                raise ConfigurationError(
                    "The env-to-module pipeline returned no column, expected at least 'obs'."
                )
            return None
        try:
            return self._module_step.forward(self._to_module, t)
        except Exception as error:
            self._blame_for(error.args[0] if isinstance(error, KeyError) else Columns.OBS)
            raise

    def _blame_for(self, column: object) -> None:
        """Raise an error if a custom piece drops a column that the module needs."""
        reader = type(self._runner.module).__name__
        self._runner.env_to_module.blame_for(column, self._to_module, reader, **self._pipeline_arguments())

    def acts(self, outputs: Any) -> tuple[Any, Sequence[Any]]:
        """Return the vector env's actions, and what `grow` takes of each environment."""
        runner = self._runner
        if outputs is None:
            batch: dict[str, Any] = {Columns.ACTIONS: [{} for _ in range(runner.num_envs)]}
        elif self._to_module is None:
            batch = outputs
            if Columns.ACTIONS_FOR_ENV not in batch and self._normalize is not None:
                for_env = self._normalize.apply_vectorized(batch[Columns.ACTIONS])
                batch = {**batch, Columns.ACTIONS_FOR_ENV: for_env}
        else:
            batch = runner.module_to_env(batch=dict(outputs), **self._pipeline_arguments())
            if Columns.ACTIONS not in batch:
                runner.module_to_env.blame_for(
                    Columns.ACTIONS, batch, "the environment", **self._pipeline_arguments()
                )
                raise ValueError(
                    f"The module-to-env pipeline returned no 'actions', only {sorted(batch)}. Each piece must "
                    "return the batch with the columns it does not own left in."
                )
        return self._stepper.acts(batch, runner.weights_seq_no)  # type: ignore[no-any-return]

    def random_acts(self, episodes: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """Return random actions in the form of `acts`."""
        return self._stepper.random_acts(episodes, self._runner.weights_seq_no)  # type: ignore[no-any-return]

    def _states(self) -> object:
        """Return the module's states of all envs, leaves ``[N, ...]`` tensors; None if stateless."""
        if not self._module_step.is_stateful:
            return None
        states = []
        for episode in self._acting:
            state_out = episode.extra_model_outputs.get(Columns.STATE_OUT)
            if state_out is not None and len(state_out):
                states.append(state_out.get(-1))
            else:
                self._give_state(episode)
                states.append(episode.initial_state)
        return tree_map(torch.from_numpy, tree_stack(states))

    def _give_state(self, part: SingleAgentEpisode) -> None:
        """Set the module's state before the first step of an agent's chunk, if the chunk lacks it."""
        if part.initial_state is None:
            modules = self._runner.multi_rl_module
            module = self._runner.module if part.module_id is None else modules[part.module_id]
            part.initial_state = initial_row(module)

    def collect(self, ended: list[tuple[int, Any]], episodes: list[Any], lookback: int) -> EpisodeBatch:
        """Return the chunks of a fragment: of ended episodes, then of ongoing ones.

        Args:
            ended: (env index, episode).
            episodes: Each environment's ongoing episode. One with steps is replaced by its next chunk.
            lookback: Env steps that the next chunks look back.
        """
        chunks = list(ended)
        following: dict[int, Any] = {}
        for index, episode in enumerate(episodes):
            if len(episode):
                chunks.append((index, episode))
                episodes[index] = following[id(episode)] = self._stepper.cut(
                    episode, lookback, self._own_lookback
                )
        self._acting = [following.get(id(episode), episode) for episode in self._acting]
        for _, episode in chunks:
            for part in self._stepper.parts(episode):
                self._give_state(part)
        batch = EpisodeBatch.from_episodes([episode for _, episode in chunks])
        batch.env_index = np.array([index for index, _ in chunks], np.int64)
        if not chunks:
            batch.observation_space = self._stepper.env.single_observation_space
            batch.action_space = self._stepper.env.single_action_space
        return batch


def _acts(episode: Any) -> bool:
    """Return whether an agent acts in an episode; the only one also does at its end, before the reset."""
    return isinstance(episode, SingleAgentEpisode) or bool(episode.get_agents_to_act())
