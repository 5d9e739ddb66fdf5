"""Policy: a trained module with its connectors and episode state, for acting outside of training.

    observation ─► env-to-module pipeline ─► module ─► module-to-env pipeline ─► the env's action
                        └──────── the ongoing episode (state, previous frames and actions) ─┘

The pipelines are those of the env runners, with the statistics frozen at their values at the end of training.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from rlzmq.algorithms.checkpoints import read_algorithm
from rlzmq.algorithms.policy_agents import (
    agents_of_policy,
    agents_with_modules,
    as_batch_of,
    as_value_of,
)
from rlzmq.algorithms.stored_config import Given
from rlzmq.config.base_config import BaseConfig
from rlzmq.connectors.rows import ColumnRows
from rlzmq.core.spaces import space_from_plain
from rlzmq.core.synonyms import AnswersSynonyms
from rlzmq.core.tracebacks import short_traceback
from rlzmq.core.tree import num_items, tree_map, tree_stack, tree_unstack
from rlzmq.core.update_plan import derive_seed
from rlzmq.episodes.columns import Columns
from rlzmq.runners.module_step import ModuleStep

__all__ = ["Policy", "first_row"]

_NOT_EXTRA = frozenset({Columns.ACTIONS, Columns.ACTIONS_FOR_ENV})
# The episode is cut to its lookback after this many steps, which bounds the memory of endless episodes.
_MAX_CHUNK_STEPS = 64


def first_row(batch: Any) -> Any:
    """Return the first item of a tree of arrays ``[N, ...]``."""
    return tree_map(lambda leaf: leaf[0], batch)


class Policy(AnswersSynonyms):
    """Computes actions like the env runners of a trained algorithm.

    Example::

        policy = Policy.load("runs/…")
        observation, _ = env.reset()
        policy.reset()
        while not done:
            observation, reward, terminated, truncated, _ = env.step(policy.compute_action(observation))

    One object plays one episode at a time; use `copy` to play several. For a multi-agent algorithm, it plays either one
    agent with one module (`module_id`, `agent_id`) or, without these, all agents at once. Observations and actions
    are then dicts by agent id.

    Args:
        config: The algorithm's config.
        modules: The acting MultiRLModule; it is not copied.
        spaces: (observation space, action space) of one env.
        connector_state: State by pipeline, as in the component "env_runner" of checkpoints.
        module_id: Id of the acting module; None: the only one, that of the agent, or all.
        agent_id: Id of the agent to play; None: the first agent mapped to the module.
        seed: Seed for sampling actions with ``explore=True``; None: ``config.seed``.
        num_env_steps_sampled: Number of env steps of the run so far, for exploration schedules.

    Attributes:
        observation_space, action_space: Spaces of the env, or of the agent if there is only one.
        is_stateless: Whether an action depends only on the latest observation: the module has no state and no
            connector piece looks back.
    """

    action_space: Any
    observation_space: Any

    def __init__(
        self,
        config: BaseConfig,
        modules: Any,
        *,
        spaces: tuple[Any, Any],
        connector_state: Mapping[str, Any] | None = None,
        module_id: str | None = None,
        agent_id: Hashable = None,
        seed: int | None = None,
        num_env_steps_sampled: int = 0,
    ) -> None:
        self.config = config
        self.num_env_steps_sampled = num_env_steps_sampled
        self._modules = modules.eval()
        self._agents = agents_of_policy(config, modules, spaces, module_id, agent_id)
        self.observation_space, self.action_space = self._agents.spaces
        both = {"__env_single__": spaces, "__env__": spaces}
        self._env_to_module = config.build_env_to_module_connector(env=None, spaces=both)
        self._module_to_env = config.build_module_to_env_connector(env=None, spaces=both)
        for name, pipeline in self.pipelines().items():
            pipeline.freeze_statistics()
            if connector_state and connector_state.get(name):
                pipeline.set_state(connector_state[name])
        self._acting = self._agents.acting
        self._lookback: int = max(1, config.episode_lookback_horizon, self._env_to_module.required_lookback)
        self.is_stateless: bool = not self._acting.is_stateful() and not self._env_to_module.required_lookback
        self._generator = torch.Generator()
        seed = config.seed if seed is None else seed
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(derive_seed(seed, "acting"))
        self._module_step = ModuleStep(self._acting, self._generator, self._env_to_module.device)
        on_rows = self._env_to_module.on_rows and self._module_to_env.on_rows
        self._acts_on_rows: bool = self.is_stateless and self._agents.on_rows and on_rows
        self.reset()

    @classmethod
    @short_traceback
    def load(
        cls,
        path: str | Path,
        *,
        module_id: str | None = None,
        agent_id: Hashable = None,
        config: BaseConfig | None = None,
        trust: Collection[str] = (),
        module_class: type | Mapping[str, type] | None = None,
        **settings: Any,
    ) -> Self:
        """Return the policy of an algorithm's checkpoint.

        Acting needs the module and its connectors. Environments, callbacks, learners and wrappers of the run need not
        be known here. A module class or a connector of your own is found by its name, or handed over.

        Args:
            path: A checkpoint written by `Algorithm.save_to_path`, or a run directory.
            module_id, agent_id: See the class.
            config: Replaces the stored config.
            trust: Packages whose code somebody else's checkpoint may name, e.g. ``["my_package"]``.
            module_class: The class of modules that the checkpoint does not find; or classes by module id.
            settings: Settings that replace the stored ones, e.g. ``env_to_module_connector``.

        Raises:
            CheckpointError: The checkpoint is incomplete or altered, or needs code that it does not carry (the text
                names it).
            KeyError: There is no such module or agent.
        """
        stored = _stored(path, Given(config, trust, module_class, settings))
        return cls(**stored, module_id=module_id, agent_id=agent_id)

    @classmethod
    @short_traceback
    def load_each(
        cls,
        path: str | Path,
        *,
        config: BaseConfig | None = None,
        trust: Collection[str] = (),
        module_class: type | Mapping[str, type] | None = None,
        **settings: Any,
    ) -> list[Self]:
        """Return a policy for each agent of a checkpoint's env, with shared modules; one policy if there are no agents.

        Agents whose module depends on the episode are left out.

        Args:
            path, config, trust, module_class, settings: See `load`.

        Raises:
            CheckpointError: See `load`.
        """
        stored = _stored(path, Given(config, trust, module_class, settings))
        ids = agents_with_modules(stored["config"], stored["spaces"])
        return [cls(**stored, module_id=module_id, agent_id=agent_id) for module_id, agent_id in ids]

    def copy(self) -> Self:
        """Return another policy with the same weights, at the beginning of a new episode."""
        new = copy.copy(self)
        new._env_to_module, new._module_to_env = copy.deepcopy((self._env_to_module, self._module_to_env))
        new.reset()
        return new

    def acting_module(self) -> tuple[str, Any, Any]:
        """Return (module id, RLModule, agent id) of a policy of one agent. The agent id is None in single-agent use.

        Raises:
            ConfigurationError: The policy plays several agents.
        """
        return self._agents.acting_module()

    def pipelines(self) -> dict[str, Any]:
        """Return the pipelines by their names in checkpoints: "env_to_module_connector", "module_to_env_connector"."""
        return {
            "env_to_module_connector": self._env_to_module,
            "module_to_env_connector": self._module_to_env,
        }

    # -- acting ---------------------------------------------------------------------------------

    def reset(self) -> None:
        """Begin a new episode: clear module state, previous frames and actions."""
        self._episode: Any = None
        self._shared_data: dict[str, Any] = {"generator": self._generator}
        self._last_actions: Any = None
        self._stored_actions: list[Any] = []
        self._last_extras: Any = None
        self._num_steps = 0

    def compute_action(self, observation: Any, *, explore: bool = False, reward: Any = 0.0) -> Any:
        """Return the env action for the next observation of the current episode.

        Args:
            observation: The env's observation. If the policy plays all agents: a dict by agent id, without the agents
                that are done.
            explore: Whether to sample from the exploration distribution instead of acting greedily.
            reward: Reward of the previous action; used only by connector pieces that read rewards, such as
                PrevActionsPrevRewards.

        Returns:
            The action in the form that the env accepts, unsquashed or clipped as in training (or a dict of them).

        Raises:
            ValueError: The observation does not fit the observation space.
        """
        if self._acts_on_rows:
            observation = as_value_of(self.observation_space, observation)
            batch = tree_map(lambda leaf: leaf[None], observation)
            action = first_row(self._act_on_columns(batch, explore))
            self._num_steps += 1
            return action
        observation = self._agents.checked(observation)
        return self._agents.unwrapped(self._step(observation, explore, reward))

    def compute_actions(self, observations: Any, *, explore: bool = False) -> Any:
        """Return the env actions for many observations, each the first of an episode. For stateless policies.

        Args:
            observations: Tree of arrays ``[N, ...]``, or a list of N observations.
            explore: See `compute_action`.

        Returns:
            Tree of arrays ``[N, ...]``. The current episode of `compute_action` is not affected.

        Raises:
            ValueError: The policy is not stateless, or the observations do not fit the space.
        """
        if not self.is_stateless or self._agents.are_all:
            why = "plays several agents" if self.is_stateless else "remembers (a state, previous frames, …)"
            raise ValueError(
                f"compute_actions() is for stateless policies of one agent; this one {why}. Use one "
                "policy.copy() per env and its compute_action()."
            )
        observations = as_batch_of(self.observation_space, observations)
        if self._acts_on_rows:
            return self._act_on_columns(observations, explore, is_batch=True)
        ongoing = self._episode
        items = [self._agents.wrapped(item) for item in tree_unstack(observations)]
        episodes = [self._agents.new_episode(item, f"{index}") for index, item in enumerate(items)]
        actions, _ = self._run_pipelines(episodes, explore, {"generator": self._generator})
        self._episode = ongoing
        return tree_stack([self._agents.unwrapped(action) for action in actions])

    # -- on whole columns -----------------------------------------------------------------------

    def _act_on_columns(self, observations: Any, explore: bool, *, is_batch: bool = False) -> object:
        to_module, to_env, step = self._env_to_module, self._module_to_env, self._module_step
        num = num_items(observations)
        is_first = np.full(num, is_batch or not self._num_steps)
        rows = ColumnRows({}, 0, is_first=is_first, num_previous=np.zeros(num, np.int64))
        stored = to_module.write(observations, rows)
        step.begin(explore=explore)
        with torch.inference_mode():
            columns, _ = step(to_module.read(stored, rows), None, self.num_env_steps_sampled)
        if Columns.ACTIONS_FOR_ENV in columns:
            return columns[Columns.ACTIONS_FOR_ENV]
        actions = columns[Columns.ACTIONS]
        if to_env.normalize is not None:
            actions = to_env.normalize.apply_vectorized(actions)
        return tree_map(lambda leaf: leaf.copy(), actions)

    # -- with an episode ------------------------------------------------------------------------

    def _step(self, observation: Any, explore: bool, reward: Any) -> Any:
        if self._episode is None:
            self._episode = self._agents.new_episode(observation, "0")
        else:
            if len(self._episode) >= _MAX_CHUNK_STEPS:
                self._episode = self._episode.cut(self._lookback)
            self._agents.add_step(self._episode, observation, self._last_actions, reward, self._last_extras)
        actions, extras = self._run_pipelines([self._episode], explore, self._shared_data)
        self._last_actions, self._last_extras = (
            self._stored_actions[0],
            self._agents.with_known_names(self._last_extras, extras[0]),
        )
        self._num_steps += 1
        return actions[0]

    def _run_pipelines(
        self, episodes: list[Any], explore: bool, shared_data: dict[str, Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return, per episode, the env actions and the extra model outputs."""
        arguments: dict[str, Any] = {
            "rl_module": self._acting,
            "episodes": episodes,
            "explore": explore,
            "shared_data": shared_data,
        }
        batch = self._env_to_module(batch={}, **arguments)
        if not batch:  # no agent acts
            self._stored_actions = [{} for _ in episodes]
            return [{} for _ in episodes], [{} for _ in episodes]
        self._module_step.begin(explore=explore)
        with torch.inference_mode():
            outputs = self._module_step.forward(batch, self.num_env_steps_sampled)
        columns = self._module_to_env(batch=dict(outputs), **arguments)
        per_episode = {
            name: values if isinstance(values, list) else tree_unstack(values)
            for name, values in columns.items()
        }
        if Columns.ACTIONS not in per_episode:
            raise ValueError(
                f"The module-to-env pipeline returned no 'actions', only {sorted(per_episode)}. Each piece "
                "must return the batch with the columns it does not own left in."
            )
        self._stored_actions = per_episode[Columns.ACTIONS]
        for_env = per_episode.get(Columns.ACTIONS_FOR_ENV, self._stored_actions)
        outputs = {name: values for name, values in per_episode.items() if name not in _NOT_EXTRA}
        extras = [
            self._agents.outputs({name: values[index] for name, values in outputs.items()}, actions)
            for index, actions in enumerate(self._stored_actions)
        ]
        return for_env, extras


def _stored(path: str | Path, given: Given) -> dict[str, Any]:
    """Return the arguments of `Policy` from a checkpoint."""
    stored = read_algorithm(path)
    state, config = stored.state, stored.config_to("act", given)
    plain = state.get("modules", {}).get("spaces")
    spaces: Any = config.single_spaces() if plain is None else tuple(map(space_from_plain, plain))
    spec = config.get_multi_rl_module_spec(spaces={"__env_single__": spaces}, inference_only=True)
    modules = spec.build(seed=config.seed)
    modules.set_state(state["learner_group/learner"]["rl_module"])
    return {
        "config": config,
        "modules": modules,
        "spaces": spaces,
        "connector_state": state["env_runner"],
        "num_env_steps_sampled": int(state["accounting"]["sampled"]),
    }
