"""EpisodeSampler: the sampling loop with one real episode per environment.

Used when a connector piece or a callback needs episodes. Per vector step: modules -> module-to-env pipeline -> env step
-> each episode grows -> env-to-module pipeline over all episodes -> callbacks. Its results are identical to those of
the samplers on whole columns. Subclasses implement the differences between single- and multi-agent episodes.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlzmq.core.trace import ENV_TO_MODULE_TIMER, INFERENCE_TIMER, MODULE_TO_ENV_TIMER
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer
from rlzmq.runners.sampler import EpisodicSampler

if TYPE_CHECKING:
    from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
    from rlzmq.runners.env_runner import EnvRunner

__all__ = ["ACTION_COLUMNS", "EpisodeSampler", "fill_outputs"]

ACTION_COLUMNS = (Columns.ACTIONS, Columns.ACTIONS_FOR_ENV)
"""Columns of a module's outputs that are not extra model outputs."""


class EpisodeSampler(EpisodicSampler):
    """Samples for a runner with per-episode connector pieces or callbacks.

    Args:
        runner: Provides env, modules, pipelines, callbacks and counters.
        lookback: Number of steps before each chunk that its columns include.
    """

    def __init__(self, runner: EnvRunner, lookback: int) -> None:
        super().__init__(runner, lookback)
        self._to_module: dict[str, Any] | None = None  # the modules' next inputs; None: not computed yet

    # -- defined by subclasses -----------------------------------------------------------------

    @abc.abstractmethod
    def _make_episode(self) -> Any:
        """Return a new episode."""

    @abc.abstractmethod
    def _initial_state(self, module_id: Any) -> Any:
        """Return a module's state at an episode's start, leaves without batch dimension; None if stateless."""

    @abc.abstractmethod
    def _cut(self, episode: Any) -> Any:
        """Return the next chunk of an ongoing episode."""

    @abc.abstractmethod
    def _make_batch(self, episodes: list[Any]) -> Any:
        """Return a batch of chunks, with the modules' states before them (see `_give_state`)."""

    # -- between fragments ---------------------------------------------------------------------

    def reset(self) -> None:
        self._prev_chunks: list[list[Any]] = [[] for _ in range(self.num_envs)]
        super().reset()
        self._acting = list(self._episodes)
        self._to_module = None
        self._templates: dict[Any, dict[str, Any]] = {}  # module id -> output -> zeros of one item

    def _new_episode(self, index: int) -> Any:
        episode = self._make_episode()
        self._call("on_episode_created", episode, index)
        return episode

    # -- one fragment --------------------------------------------------------------------------

    def _begin_fragment(self) -> None:
        if not self._has_observed():
            self._observe()
            for index in sorted(self._starting):
                self._call("on_episode_start", self._episodes[index], index)

    def _has_observed(self) -> bool:
        return self._to_module is not None

    def _begin_episode(self, index: int) -> None:
        super()._begin_episode(index)
        self._prev_chunks[index] = []

    def _finish_episode(self, index: int, episode: Any, last_step: int) -> None:
        self._call("on_episode_end", episode, index, prev_episode_chunks=self._prev_chunks[index])
        super()._finish_episode(index, episode, last_step)

    def _observe(self) -> None:
        """Run the env-to-module pipeline over all episodes; the next actions are computed from its output."""
        timers = self.runner.timers
        self._acting = list(self._episodes)
        num_steps = self._num_steps_in(self._acting)  # no piece changes it
        timers.add("env_to_module_sum_episodes_length_in", num_steps)
        start_s = time.perf_counter()
        self._run_env_to_module()
        timers.add_stage(ENV_TO_MODULE_TIMER, start_s, time.perf_counter())
        timers.add("env_to_module_sum_episodes_length_out", num_steps)

    def _num_steps_in(self, episodes: list[Any]) -> int:
        """Return the env steps of all these chunks."""
        return sum(map(len, episodes))

    def _run_env_to_module(self) -> None:
        self._to_module = self.runner.env_to_module(batch={}, **self._pipeline_arguments())

    def _run_module_to_env(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        batch = self.runner.module_to_env(batch=dict(outputs), **self._pipeline_arguments())
        if Columns.ACTIONS not in batch:
            raise ValueError(
                f"The module-to-env pipeline returned no 'actions', only {sorted(batch)}. Each piece must "
                "return the batch with the columns it does not own left in."
            )
        return batch  # type: ignore[no-any-return]

    def _pipeline_arguments(self) -> dict[str, Any]:
        runner = self.runner
        return {
            "rl_module": runner.module,
            "episodes": self._acting,
            "explore": self._request.explore,
            "shared_data": runner.shared_data,
            "metrics": runner.metrics,
        }

    def _time_acting(self, start_s: float, acted_s: float) -> None:
        """Add the times of the modules (until `acted_s`) and of the module-to-env pipeline (until now)."""
        self.runner.timers.add_stage(INFERENCE_TIMER, start_s, acted_s)
        self.runner.timers.add_stage(MODULE_TO_ENV_TIMER, acted_s, time.perf_counter())

    # -- outputs and states of the modules -----------------------------------------------------

    def _outputs_of_random_actions(self, episode: SingleAgentEpisode, module_id: Any) -> dict[str, Any]:
        """Return zeros in place of the outputs that the module gave before; its state does not change."""
        outputs = dict(self._templates.get(module_id, {}))
        if Columns.STATE_OUT in outputs:
            outputs[Columns.STATE_OUT] = self._state_now(episode)
        return outputs

    def _state_now(self, episode: SingleAgentEpisode) -> Any:
        """Return the module's state at an agent's last observation; None if it is stateless."""
        state_out = episode.extra_model_outputs.get(Columns.STATE_OUT)
        if state_out is not None and len(state_out):
            return state_out.get(-1)
        if episode.initial_state is not None:
            return episode.initial_state
        return self._initial_state(episode.module_id)

    def _give_state(self, episode: SingleAgentEpisode) -> None:
        """Set the module's state before the chunk's first step, if the chunk lacks it."""
        if episode.initial_state is None:
            episode.initial_state = self._initial_state(episode.module_id)

    # -- the result ----------------------------------------------------------------------------

    def _batch(self, chunks: list[tuple[int, Any]], ongoing: list[tuple[int, Any]]) -> Any:
        for index, episode in ongoing:
            self._episodes[index] = chunk = self._cut(episode)
            if self.runner.callbacks.has("on_episode_end"):
                self._prev_chunks[index].append(episode)
            self._acting = [chunk if acting is episode else acting for acting in self._acting]
        batch = self._make_batch([episode for _, episode in chunks + ongoing])
        batch.env_index = np.array([index for index, _ in chunks + ongoing], np.int64)
        return batch


def fill_outputs(episode: SingleAgentEpisode, zeros: Mapping[str, Any], names: Iterable[str]) -> None:
    """Add model outputs that begin in mid-episode, after random actions; fill the earlier steps with `zeros`."""
    num_before = episode.rewards.len_incl_lookback()
    for name in names if num_before else ():
        episode.extra_model_outputs[name] = InfiniteLookbackBuffer(
            [zeros[name]] * num_before, episode.rewards.lookback
        )
