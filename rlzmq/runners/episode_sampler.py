"""EpisodeSampler: the sampling loop with one real episode per environment, of one agent or of several.

Used when a connector piece or a callback needs episodes. Per vector step: modules -> module-to-env pipeline -> env step
-> each episode grows -> env-to-module pipeline over all episodes -> callbacks. Its results are identical to those of
the samplers on rows.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from rlzmq.connectors.common.agent_to_module_mapping import checked_mapping
from rlzmq.core.metrics import ENV_STEP_TIMER, ENV_TO_MODULE_TIMER, INFERENCE_TIMER, MODULE_TO_ENV_TIMER
from rlzmq.core.tree import tree_map, tree_stack, tree_unstack
from rlzmq.envs.observation_check import as_space_dtype, check_agents_observations
from rlzmq.episodes.agent_timelines import Pending
from rlzmq.episodes.columns import DEFAULT_AGENT_ID, DEFAULT_MODULE_ID, Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.episodes.step_values import checked_infos, checked_rewards
from rlzmq.runners.episode_metrics import (
    EpisodeTotals,
    FinishedEpisodes,
    length_of,
    recorded_return,
    returns_of,
)
from rlzmq.runners.module_step import ModuleStep, to_numpy
from rlzmq.runners.rows_sampler import Sampler

if TYPE_CHECKING:
    from rlzmq.runners.env_runner import EnvRunner, SampleRequest

__all__ = ["AgentsEpisodeSampler", "EpisodeSampler", "new_agents_episode"]

# Columns of a module's outputs that are not extra model outputs.
_ACTION_COLUMNS = (Columns.ACTIONS, Columns.ACTIONS_FOR_ENV)


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
        self._counts_agent_steps = runner.config.count_steps_by == "agent_steps"
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
        """Add an env's step to its episode; return the number of agent steps completed (0 if they are not counted)."""

    @abc.abstractmethod
    def _observe(self) -> None:
        """Turn the episodes' last observations into the modules' next inputs."""

    @abc.abstractmethod
    def _batch(self, chunks: list[tuple[int, Any]], ongoing: list[tuple[int, Any]]) -> object:
        """Return a batch of (env index, episode) chunks and ongoing chunks; begin new chunks for the latter."""

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
        if length_of(episode):
            episode.truncate()
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
                self.runner.num_failures_in_a_row = 0
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
        totals.add(*returns_of(episode))
        duration_s = time.perf_counter() - totals.started_s
        self._ended.append(_Ended(last_step, index, totals, length_of(episode), duration_s, episode))
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
            self._totals[index].add(*returns_of(episode))
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


class EpisodeSampler(EpisodicSampler):
    """Samples for a runner with per-episode connector pieces or callbacks, of one agent and one module.

    If only the user's env-to-module pieces need episodes, the default pieces after them and the module-to-env pieces
    still run on whole columns.
    """

    def __init__(self, runner: EnvRunner) -> None:
        pipeline, module_to_env = runner.env_to_module, runner.module_to_env
        super().__init__(runner, max(runner.config.episode_lookback_horizon, pipeline.required_lookback))
        self._module_step = ModuleStep(runner.module, runner.generator)
        self._num_user_pieces = pipeline.num_own_pieces if module_to_env.on_rows else None
        self._normalize = module_to_env.normalize
        # The module's next inputs: what the pipeline made, or only observations if its default pieces do not run.
        self._to_module: dict[str, Any] | None = None
        self._module_observations: Any = None

    # -- episodes ------------------------------------------------------------------------------

    def reset(self) -> None:
        self._prev_chunks: list[list[Any]] = [[] for _ in range(self.num_envs)]
        super().reset()
        self._acting = list(self._episodes)
        self._to_module = self._module_observations = None
        self._templates: dict[Any, dict[str, Any]] = {}  # module id -> output -> zeros of one item

    def _new_episode(self, index: int) -> Any:
        episode = self._make_episode()
        self._call("on_episode_created", episode, index)
        return episode

    def _make_episode(self) -> Any:
        return SingleAgentEpisode(
            id_=self.runner.new_episode_id(),
            observation_space=self.env.single_observation_space,
            action_space=self.env.single_action_space,
        )

    def _begin(self, episode: Any, observation: Any, info: Any) -> None:
        episode.add_env_reset(observation, info)

    def _grow(self, index: int, episode: Any, act: Any, row: tuple[Any, ...]) -> int:
        observation, reward, terminated, truncated, info = row
        episode.add_env_step(
            observation,
            act[0],
            reward,
            info,
            terminated=terminated,
            truncated=truncated,
            extra_model_outputs=act[1],
        )
        if terminated or truncated:
            self._has_ended = True
        return 0

    def _begin_episode(self, index: int) -> None:
        super()._begin_episode(index)
        self._prev_chunks[index] = []

    def _finish_episode(self, index: int, episode: object, last_step: int) -> None:
        self._call("on_episode_end", episode, index, prev_episode_chunks=self._prev_chunks[index])
        super()._finish_episode(index, episode, last_step)
        if (recorded := recorded_return(self._last_info(episode))) is not None:
            self._totals[index].agent_returns[DEFAULT_AGENT_ID] = recorded

    def _last_info(self, episode: Any) -> Mapping[str, Any]:
        """Return the info of an ended episode's last step, if it may have a recorded return."""
        return episode.get_infos(-1) if len(episode) else {}

    # -- observing -----------------------------------------------------------------------------

    def _begin_fragment(self) -> None:
        self._names: list[str] = []  # outputs of the fragment's last step
        self._module_step.begin(explore=self._request.explore)
        if self._to_module is None and self._module_observations is None:
            self._observe()
            for index in sorted(self._starting):
                self._call("on_episode_start", self._episodes[index], index)

    def _observe(self) -> None:
        """Run the env-to-module pipeline over all episodes; the next actions are computed from its output."""
        timers = self.runner.timers
        self._acting = list(self._episodes)
        num_steps = sum(map(len, self._acting))  # no piece changes it
        timers.add("env_to_module_sum_episodes_length_in", num_steps)
        start_s = time.perf_counter()
        pipeline, arguments = self.runner.env_to_module, self._pipeline_arguments()
        if self._num_user_pieces is None:
            self._to_module = pipeline(batch={}, **arguments)
        elif batch := pipeline.run_pieces(0, self._num_user_pieces, batch={}, **arguments):
            # A piece added columns, and the default pieces do the rest.
            num_pieces = len(pipeline.connectors)
            self._to_module = pipeline.run_pieces(self._num_user_pieces, num_pieces, batch=batch, **arguments)
        else:
            self._to_module = None
            self._module_observations = tree_stack([episode.observations.get(-1) for episode in self._acting])
        timers.add_stage(ENV_TO_MODULE_TIMER, start_s, time.perf_counter())
        timers.add("env_to_module_sum_episodes_length_out", num_steps)

    def _pipeline_arguments(self) -> dict[str, Any]:
        runner = self.runner
        return {
            "rl_module": runner.module,
            "episodes": self._acting,
            "explore": self._request.explore,
            "shared_data": runner.shared_data,
            "metrics": runner.metrics,
        }

    # -- acting --------------------------------------------------------------------------------

    def _act(self, t: int) -> tuple[Any, Sequence[Any]]:
        start_s = time.perf_counter()
        if self._to_module is None:
            outputs, _ = self._module_step(self._module_observations, self._states(), t)
            acted_s = time.perf_counter()
            columns = {name: tree_unstack(values) for name, values in outputs.items()}
            for_env = outputs.get(Columns.ACTIONS_FOR_ENV, outputs[Columns.ACTIONS])
            if Columns.ACTIONS_FOR_ENV not in outputs and self._normalize is not None:
                for_env = self._normalize.apply_vectorized(for_env)
        else:
            outputs = self._module_step.forward(self._to_module, t)
            acted_s = time.perf_counter()
            batch = self.runner.module_to_env(batch=dict(outputs), **self._pipeline_arguments())
            if Columns.ACTIONS not in batch:
                raise ValueError(
                    f"The module-to-env pipeline returned no 'actions', only {sorted(batch)}. Each piece must "
                    "return the batch with the columns it does not own left in."
                )
            columns = {name: self._per_env(name, values) for name, values in batch.items()}
            for_env = self._for_vector_env(columns.get(Columns.ACTIONS_FOR_ENV, columns[Columns.ACTIONS]))
        self.runner.timers.add_stage(INFERENCE_TIMER, start_s, acted_s)
        self.runner.timers.add_stage(MODULE_TO_ENV_TIMER, acted_s, time.perf_counter())
        return for_env, self._acts(columns)

    def _per_env(self, name: str, values: object) -> list[Any]:
        """Return one item per env, from a list or a batched tree."""
        items = values if isinstance(values, list) else tree_unstack(tree_map(to_numpy, values))
        if len(items) != self.num_envs:
            raise ValueError(
                f"Column {name!r} after the module-to-env pipeline has {len(items)} items, expected one for "
                f"each of the {self.num_envs} environments, in their order."
            )
        return items

    def _for_vector_env(self, actions: list[Any]) -> object:
        batched = tree_stack(actions)
        space = self.env.single_action_space
        if (
            isinstance(batched, np.ndarray)
            and space.dtype is not None
            and batched.dtype.kind != space.dtype.kind
        ):
            return batched.astype(space.dtype)
        return batched

    def _acts(self, columns: dict[str, list[Any]]) -> Sequence[Any]:
        """Return each env's act that `_grow` needs: its action, and the extra model outputs."""
        names = [name for name in columns if name not in _ACTION_COLUMNS]
        versions = [self.runner.weights_seq_no] * self.num_envs
        rows = zip(*[columns[name] for name in names], versions, strict=True)
        keys = (*names, Columns.WEIGHTS_VERSION)
        outputs = [dict(zip(keys, row)) for row in rows]  # noqa: B905  (a check would cost a tenth)
        if names != self._names:
            self._begin_outputs(names, outputs)
        return list(zip(columns[Columns.ACTIONS], outputs, strict=True))

    def _begin_outputs(self, names: list[str], outputs: list[dict[str, Any]]) -> None:
        """Fill outputs that begin in mid-episode, after random actions, with zeros for the earlier steps."""
        template = self._templates.setdefault(DEFAULT_MODULE_ID, {})
        zeros = {name: tree_map(np.zeros_like, outputs[0][name]) for name in names if name not in template}
        for episode in self._episodes:
            new = [name for name in zeros if name not in episode.extra_model_outputs]
            if new and len(episode):
                raise ValueError(
                    f"Episode {episode.id_!r}: the extra model output {new[0]!r} came at step "
                    f"{len(episode)} of a chunk; each output must be there at every step or never."
                )
            _fill_outputs(episode, zeros, new)
        template.update(zeros)
        self._names = names

    def _random_actions(self) -> tuple[Any, Sequence[Any]]:
        actions = self.stepper.sample_random_actions()
        items = tree_unstack(tree_map(np.copy, actions))
        return actions, [
            (item, self._outputs_of_random_actions(episode, DEFAULT_MODULE_ID))
            for item, episode in zip(items, self._episodes, strict=True)
        ]

    def _outputs_of_random_actions(self, episode: SingleAgentEpisode, module_id: object) -> dict[str, Any]:
        """Return zeros in place of the outputs that the module gave before; its state does not change."""
        outputs = {**self._templates.get(module_id, {}), Columns.WEIGHTS_VERSION: self.runner.weights_seq_no}
        if Columns.STATE_OUT in outputs:
            outputs[Columns.STATE_OUT] = self._state_now(episode)
        return outputs

    # -- states --------------------------------------------------------------------------------

    def _states(self) -> Any:
        """Return the module's states of all envs, leaves ``[N, ...]`` tensors; None if stateless."""
        if not self._module_step.is_stateful:
            return None
        return tree_map(torch.from_numpy, tree_stack([self._state_now(episode) for episode in self._acting]))

    def _state_now(self, episode: SingleAgentEpisode) -> Any:
        """Return the module's state at an agent's last observation; None if it is stateless."""
        state_out = episode.extra_model_outputs.get(Columns.STATE_OUT)
        if state_out is not None and len(state_out):
            return state_out.get(-1)
        if episode.initial_state is not None:
            return episode.initial_state
        return self._initial_state(episode.module_id)

    def _initial_state(self, module_id: object) -> object:
        """Return a module's state at an episode's start, leaves without batch dimension; None if stateless."""
        return self._module_step.initial_row_numpy if self._module_step.is_stateful else None

    def _give_state(self, episode: SingleAgentEpisode) -> None:
        """Set the module's state before the chunk's first step, if the chunk lacks it."""
        if episode.initial_state is None:
            episode.initial_state = self._initial_state(episode.module_id)

    # -- the result ----------------------------------------------------------------------------

    def _batch(self, chunks: list[tuple[int, Any]], ongoing: list[tuple[int, Any]]) -> object:
        for index, episode in ongoing:
            self._episodes[index] = chunk = self._cut(episode)
            if "on_episode_end" in self.runner.callbacks.hooks:
                self._prev_chunks[index].append(episode)
            self._acting = [chunk if acting is episode else acting for acting in self._acting]
        batch = self._make_batch([episode for _, episode in chunks + ongoing])
        batch.env_index = np.array([index for index, _ in chunks + ongoing], np.int64)
        return batch

    def _cut(self, episode: Any) -> Any:
        """Return the next chunk of an ongoing episode."""
        return episode.cut(self.lookback)

    def _make_batch(self, episodes: list[Any]) -> EpisodeBatch:
        """Return a batch of chunks, with the modules' states before them."""
        for episode in episodes:
            self._give_state(episode)
        batch = EpisodeBatch.from_episodes(episodes)
        if not episodes:
            batch.observation_space = self.env.single_observation_space
            batch.action_space = self.env.single_action_space
        return batch


def _fill_outputs(episode: SingleAgentEpisode, zeros: Mapping[str, Any], names: Iterable[str]) -> None:
    """Add model outputs that begin in mid-episode, after random actions; fill the earlier steps with `zeros`."""
    num_before = episode.rewards.len_incl_lookback()
    for name in names if num_before else ():
        episode.extra_model_outputs[name] = InfiniteLookbackBuffer(
            [zeros[name]] * num_before, episode.rewards.lookback
        )


def new_agents_episode(runner: EnvRunner, mapping_fn: Any) -> MultiAgentEpisode:
    """Return an episode of the runner's agents, not reset yet."""
    return MultiAgentEpisode(
        runner.new_episode_id(),
        agent_to_module_mapping_fn=mapping_fn,
        observation_space=runner.env.single_observation_spaces,
        action_space=runner.env.single_action_spaces,
    )


class AgentsEpisodeSampler(EpisodeSampler):
    """An EpisodeSampler for environments of several agents, and several modules."""

    def __init__(self, runner: EnvRunner) -> None:
        super().__init__(runner)
        self.lookback = runner.config.episode_lookback_horizon
        self._num_user_pieces = None
        self._mapping_fn = checked_mapping(runner)

    # -- episodes ------------------------------------------------------------------------------

    def reset(self) -> None:
        super().reset()
        self._check_agents()

    def _make_episode(self) -> MultiAgentEpisode:
        return new_agents_episode(self.runner, self._mapping_fn)

    def _begin(self, episode: MultiAgentEpisode, observation: Any, info: Any) -> None:
        info = checked_infos(info, f"episode {episode.id_}, env step 0")
        episode.add_env_reset(observations=self._own(observation), infos=info)

    def _grow(self, index: int, episode: MultiAgentEpisode, act: Any, row: tuple[Any, ...]) -> int:
        observations, rewards, terminateds, truncateds, infos = row
        num_before = episode.agent_steps() if self._counts_agent_steps else 0
        where = f"episode {episode.id_}, env step {episode.env_t + 1}"
        episode.add_env_step(
            self._own(observations),
            act[0],
            checked_rewards(rewards, where),
            checked_infos(infos, where),
            terminateds=terminateds,
            truncateds=truncateds,
            extra_model_outputs=act[1],
        )
        if episode.is_done:
            self.env.needs_reset[index] = self._has_ended = True
        return episode.agent_steps() - num_before if self._counts_agent_steps else 0

    def _own(self, observations: dict[Any, Any]) -> dict[Any, Any]:
        """Return copies in their spaces' dtypes. An env may overwrite its arrays in the next step."""
        spaces = self.env.single_observation_spaces.spaces
        return {
            agent_id: as_space_dtype(spaces.get(agent_id), tree_map(_copy, observation))
            for agent_id, observation in observations.items()
        }

    def _add_step(self, rows: Sequence[tuple[Any, ...]], acts: Sequence[Any]) -> int:
        num_env_steps = super()._add_step(rows, acts)
        self._check_agents()
        return num_env_steps

    def _last_info(self, episode: MultiAgentEpisode) -> Mapping[str, Any]:
        return {}

    # -- acting --------------------------------------------------------------------------------

    def _act(self, t: int) -> tuple[Any, Sequence[Any]]:
        if not self._to_module:  # no agent acts, since all environments are at an episode's end
            return [{} for _ in range(self.num_envs)], [({}, {})] * self.num_envs
        return super()._act(t)

    def _per_env(self, name: str, values: object) -> list[Any]:
        if not isinstance(values, list) or len(values) != self.num_envs:
            raise ValueError(
                f"Column {name!r} after the module-to-env pipeline: expected a list of {self.num_envs} dicts by "
                f"agent id, one per environment, got {type(values).__name__}."
            )
        return values

    def _for_vector_env(self, actions: list[Any]) -> object:
        return actions

    def _acts(self, columns: dict[str, list[Any]]) -> Sequence[Any]:
        acts = []
        for index, by_agent in enumerate(columns[Columns.ACTIONS]):
            of_env = {
                name: per_env[index] for name, per_env in columns.items() if name not in _ACTION_COLUMNS
            }
            per_agent = {}
            for agent_id in by_agent:
                own = {name: values[agent_id] for name, values in of_env.items() if agent_id in values}
                self._remember(self._acting[index], agent_id, own)
                own[Columns.WEIGHTS_VERSION] = self.runner.weights_seq_no
                per_agent[agent_id] = own
            acts.append((by_agent, per_agent))
        return acts

    def _random_actions(self) -> tuple[Any, Sequence[Any]]:
        spaces = self.env.single_action_spaces
        acts = []
        for episode in self._episodes:
            to_act = episode.get_agents_to_act()
            by_agent = {
                agent_id: spaces[agent_id].sample()
                for agent_id in episode.agent_episodes
                if agent_id in to_act
            }
            per_agent = {}
            for agent_id in by_agent:
                sae = episode.agent_episodes[agent_id]
                per_agent[agent_id] = own = self._outputs_of_random_actions(sae, str(sae.module_id))
                self._fill_agents_outputs(episode, agent_id, own)
            acts.append((by_agent, per_agent))
        return [by_agent for by_agent, _ in acts], acts

    def _remember(self, episode: MultiAgentEpisode, agent_id: object, outputs: dict[str, Any]) -> None:
        """Store zeros with the structure of a module's outputs, for steps in which it does not act."""
        templates = self._templates.setdefault(episode.module_for(agent_id), {})
        if templates.keys() != outputs.keys():
            for name, value in outputs.items():
                templates.setdefault(name, tree_map(np.zeros_like, value))
        self._fill_agents_outputs(episode, agent_id, outputs)

    def _fill_agents_outputs(
        self, episode: MultiAgentEpisode, agent_id: object, outputs: Mapping[str, Any]
    ) -> None:
        """Fill outputs that begin in mid-episode, after random actions, with zeros for the earlier steps."""
        track, sae = episode._timeline.tracks[agent_id], episode.agent_episodes[agent_id]
        if track.output_keys is None or outputs.keys() <= track.output_keys:
            return
        zeros = {
            name: tree_map(np.zeros_like, value)
            for name, value in outputs.items()
            if name not in track.output_keys
        }
        if Columns.STATE_OUT in zeros:  # random actions have left the state as it was
            zeros[Columns.STATE_OUT] = self._state_now(sae)
        _fill_outputs(sae, zeros, zeros)
        if track.pending is not None:
            track.pending = Pending(track.pending.action, {**track.pending.extra_model_outputs, **zeros})
        track.output_keys = frozenset((*track.output_keys, *zeros))

    def _initial_state(self, module_id: object) -> object:
        module = self.runner.multi_rl_module[module_id]
        return tree_map(to_numpy, module.get_initial_state()) if module.is_stateful() else None

    # -- the result ----------------------------------------------------------------------------

    def _batch(self, chunks: list[tuple[int, Any]], ongoing: list[tuple[int, Any]]) -> object:
        """Also add zero outputs for agents whose module first acted for others in this fragment."""
        for episode in [*(episode for _, episode in chunks), *self._episodes]:
            for agent_id in episode._timeline.tracks:
                templates = self._templates.get(episode.module_for(agent_id), {})
                self._fill_agents_outputs(episode, agent_id, templates)
        return super()._batch(chunks, ongoing)

    def _cut(self, episode: MultiAgentEpisode) -> MultiAgentEpisode:
        back = episode._timeline.env_steps_back(self.runner.env_to_module.required_lookback)
        return episode.cut(max(self.lookback, back))

    def _make_batch(self, episodes: list[MultiAgentEpisode]) -> EpisodeBatch:
        for episode in episodes:
            episode.prune()
            for sae in episode.agent_episodes.values():
                self._give_state(sae)
        return EpisodeBatch.from_episodes(episodes)


def _copy(leaf: object) -> object:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
