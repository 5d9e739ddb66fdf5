"""MultiAgentEpisodeSampler: samples multi-agent environments with real episodes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlzmq.core.tree import tree_map
from rlzmq.envs.observation_check import as_space_dtype
from rlzmq.episodes.agent_timelines import Pending
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.step_values import checked_infos, checked_rewards
from rlzmq.runners.episode_sampler import ACTION_COLUMNS, EpisodeSampler, fill_outputs
from rlzmq.runners.module_step import to_numpy
from rlzmq.runners.multi.module_mapping import checked_mapping
from rlzmq.runners.sampler import WEIGHTS_SEQ_NO

if TYPE_CHECKING:
    from rlzmq.runners.env_runner import EnvRunner

__all__ = ["MultiAgentEpisodeSampler"]


class MultiAgentEpisodeSampler(EpisodeSampler):
    """An EpisodeSampler for multi-agent environments and several modules."""

    def __init__(self, runner: EnvRunner) -> None:
        super().__init__(runner, runner.config.episode_lookback_horizon)
        self._mapping_fn = checked_mapping(runner)

    # -- episodes and the vector env -----------------------------------------------------------

    def reset(self) -> None:
        super().reset()
        self._check_agents()

    def _make_episode(self) -> MultiAgentEpisode:
        return MultiAgentEpisode(
            self.runner.new_episode_id(),
            agent_to_module_mapping_fn=self._mapping_fn,
            observation_space=self.env.single_observation_spaces,
            action_space=self.env.single_action_spaces,
        )

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

    def _add_step(self, rows: Sequence[tuple[Any, ...]], acts: Sequence[Any]) -> int:
        num_env_steps = super()._add_step(rows, acts)
        self._check_agents()
        return num_env_steps

    def _returns(self, episode: MultiAgentEpisode) -> tuple[Mapping[Any, float], Mapping[Any, str]]:
        by_agent = episode.agent_episodes
        returns = {agent_id: sae.get_return() for agent_id, sae in by_agent.items()}
        return returns, {agent_id: str(sae.module_id) for agent_id, sae in by_agent.items()}

    def _truncate(self, episode: MultiAgentEpisode) -> None:
        episode.truncate()

    # -- acting --------------------------------------------------------------------------------

    def _act(self, t: int) -> tuple[Any, Sequence[Any]]:
        if not self._to_module:  # no agent acts, since all environments are at an episode's end
            return [{} for _ in range(self.num_envs)], [({}, {})] * self.num_envs
        start_s = time.perf_counter()
        modules = self.runner.multi_rl_module
        with torch.inference_mode():
            if self._request.explore:
                outputs = modules.forward_exploration(self._to_module, t=t)
            else:
                outputs = modules.forward_inference(self._to_module)
        acted_s = time.perf_counter()
        columns = self._run_module_to_env(outputs)
        self._time_acting(start_s, acted_s)
        for name, per_env in columns.items():
            if not isinstance(per_env, list) or len(per_env) != self.num_envs:
                raise ValueError(
                    f"Column {name!r} after the module-to-env pipeline: expected a list of "
                    f"{self.num_envs} dicts by "
                    f"agent id, one per environment, got {type(per_env).__name__} of {len(per_env)}."
                )
        actions = columns[Columns.ACTIONS]
        acts = []
        for index, by_agent in enumerate(actions):
            of_env = {name: per_env[index] for name, per_env in columns.items() if name not in ACTION_COLUMNS}
            per_agent = {}
            for agent_id in by_agent:
                own = {name: values[agent_id] for name, values in of_env.items() if agent_id in values}
                self._remember(self._acting[index], agent_id, own)
                own[WEIGHTS_SEQ_NO] = self.runner.weights_seq_no
                per_agent[agent_id] = own
            acts.append((by_agent, per_agent))
        return columns.get(Columns.ACTIONS_FOR_ENV, actions), acts

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
                own = self._outputs_of_random_actions(sae, str(sae.module_id))
                self._begin_outputs(episode, agent_id, own)
                own[WEIGHTS_SEQ_NO] = self.runner.weights_seq_no
                per_agent[agent_id] = own
            acts.append((by_agent, per_agent))
        return [by_agent for by_agent, _ in acts], acts

    def _remember(self, episode: MultiAgentEpisode, agent_id: Any, outputs: dict[str, Any]) -> None:
        """Store zeros with the structure of a module's outputs, for steps in which it does not act."""
        templates = self._templates.setdefault(episode.module_for(agent_id), {})
        if templates.keys() != outputs.keys():
            for name, value in outputs.items():
                templates.setdefault(name, tree_map(np.zeros_like, value))
        self._begin_outputs(episode, agent_id, outputs)

    def _begin_outputs(self, episode: MultiAgentEpisode, agent_id: Any, outputs: Mapping[str, Any]) -> None:
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
        fill_outputs(sae, zeros, zeros)
        if track.pending is not None:
            track.pending = Pending(track.pending.action, {**track.pending.extra_model_outputs, **zeros})
        track.output_keys = frozenset((*track.output_keys, *zeros))

    def _complete_outputs(self, episodes: Sequence[MultiAgentEpisode]) -> None:
        """Add zero outputs for agents whose module first acted for others in this fragment."""
        for episode in episodes:
            for agent_id in episode._timeline.tracks:
                self._begin_outputs(episode, agent_id, self._templates.get(episode.module_for(agent_id), {}))

    def _initial_state(self, module_id: Any) -> Any:
        module = self.runner.multi_rl_module[module_id]
        return tree_map(to_numpy, module.get_initial_state()) if module.is_stateful() else None

    # -- the result ----------------------------------------------------------------------------

    def _batch(self, chunks: list[tuple[int, Any]], ongoing: list[tuple[int, Any]]) -> Any:
        self._complete_outputs([episode for _, episode in chunks])
        self._complete_outputs(self._episodes)
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

    def _own(self, observations: dict[Any, Any]) -> dict[Any, Any]:
        """Return copies in their spaces' dtypes. An env may overwrite its arrays in the next step."""
        spaces = self.env.single_observation_spaces.spaces
        return {
            agent_id: as_space_dtype(spaces.get(agent_id), tree_map(_copy, observation))
            for agent_id, observation in observations.items()
        }


def _copy(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
