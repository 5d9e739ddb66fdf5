"""SyncVectorMultiAgentEnv: several multi-agent environments, stepped one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rlzmq.core.errors import ConfigurationError, EnvError, MultiAgentEnvError
from rlzmq.envs.multi_agent_env import AgentDict, agent_spaces
from rlzmq.envs.registry import EnvContext, EnvEntry, MakingEnvs, make_env, resolve_env
from rlzmq.envs.sync_vector import Recover
from rlzmq.episodes.step_values import as_flag

__all__ = ["SyncVectorMultiAgentEnv", "make_multi_agent_vec"]

Row = tuple[AgentDict, AgentDict, AgentDict, AgentDict, AgentDict]

_DICT = frozenset({dict})
_RESET_PARTS = ("observations", "infos")
_STEP_PARTS = ("observations", "rewards", "terminateds", "truncateds", "infos")

_STEPS_KEPT = 10_000  # actions of one episode


class SyncVectorMultiAgentEnv:
    """N multi-agent environments in this process, with NEXT_STEP autoreset.

    After an episode's end, the next `step` resets that environment: its actions are ignored, and it returns the reset
    observations without rewards and flags. Observations are not copied.

    Args:
        creators: Makes environment i, by index. The agents' spaces must be the same in all environments.

    Attributes:
        envs: The environments.
        num_envs: N.
        single_observation_spaces, single_action_spaces: One environment's spaces by agent id.
        needs_reset: bool[N], whether the next step resets the environment; may be set (e.g. when all known agents are
            done).
        resetting: bool[N], whether the last step reset the environment.
        is_resetting: Whether an environment is being created or reset in a step right now; for other threads.
        failed: Indices of the environments that were recreated in the last step or reset.
        episode_seeds: The seed of each environment's last reset, or None.
        episode_actions: The actions of each environment's current episode; of very long ones, none.
        recover: See `LeanSyncVectorEnv`.
    """

    single_action_spaces: gym.spaces.Dict
    single_observation_spaces: gym.spaces.Dict

    def __init__(self, creators: Sequence[Callable[[], Any]]) -> None:
        self._creators = list(creators)
        self.num_envs: int = len(self._creators)
        self.envs: list[Any] = [creator() for creator in self._creators]
        self.single_observation_spaces, self.single_action_spaces = agent_spaces(self.envs[0])
        for index, env in enumerate(self.envs[1:], 1):
            if agent_spaces(env) != (self.single_observation_spaces, self.single_action_spaces):
                raise ConfigurationError(
                    f"Environment {index} of {self.num_envs} has other agents or spaces than environment 0: "
                    f"{agent_spaces(env)[0]}, expected {self.single_observation_spaces}."
                )
        self.needs_reset: NDArray[np.bool_] = np.zeros(self.num_envs, np.bool_)
        self.resetting: NDArray[np.bool_] = np.zeros(self.num_envs, np.bool_)
        self.is_resetting: bool = False
        self.failed: list[int] = []
        self.recover: Recover | None = None
        self.episode_seeds: list[int | None] = [None] * self.num_envs
        self.episode_actions: list[list[AgentDict]] = [[] for _ in range(self.num_envs)]

    @property
    def unwrapped(self) -> SyncVectorMultiAgentEnv:
        """This environment."""
        return self

    @property
    def single_observation_space(self) -> gym.spaces.Dict:
        """`single_observation_spaces`."""
        return self.single_observation_spaces

    @property
    def single_action_space(self) -> gym.spaces.Dict:
        """`single_action_spaces`."""
        return self.single_action_spaces

    @property
    def observation_space(self) -> gym.spaces.Tuple[Any]:
        """One Dict by agent id per environment."""
        return gym.spaces.Tuple([self.single_observation_spaces] * self.num_envs)

    @property
    def action_space(self) -> gym.spaces.Tuple[Any]:
        """One Dict by agent id per environment."""
        return gym.spaces.Tuple([self.single_action_spaces] * self.num_envs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[AgentDict], list[AgentDict]]:
        """Reset all environments.

        Args:
            seed: Environment i gets ``seed + 1000 * i``. The distance is wide because environments may seed their
                parts with the following numbers.

        Returns:
            (observations, infos): one dict by agent id per environment.
        """
        self.failed = []
        results = [
            self._reset_env(index, None if seed is None else seed + 1000 * index, options)
            for index in range(self.num_envs)
        ]
        self.needs_reset[:] = False
        self.resetting[:] = True
        return [observations for observations, _ in results], [infos for _, infos in results]

    def step(
        self, actions: Sequence[AgentDict]
    ) -> tuple[list[AgentDict], list[AgentDict], list[AgentDict], list[AgentDict], list[AgentDict]]:
        """Step all environments; reset those whose episode is over.

        Args:
            actions: One dict by agent id per environment.

        Returns:
            (observations, rewards, terminateds, truncateds, infos): one dict by agent id per environment.
        """
        observations, rewards, terminateds, truncateds, infos = map(
            list, zip(*self.step_rows(actions), strict=True)
        )
        return observations, rewards, terminateds, truncateds, infos

    def step_rows(self, actions: Sequence[AgentDict]) -> list[Row]:
        """Step as `step` does; return (observations, rewards, terminateds, truncateds, infos) of each environment."""
        if len(actions) != self.num_envs:
            raise ValueError(
                f"step: expected {self.num_envs} action dicts, one per environment, got {len(actions)}."
            )
        rows: list[Row] = []
        self.failed = []
        needs_reset, histories = self.needs_reset, self.episode_actions
        self.resetting[:] = needs_reset
        stepped = zip(self.envs, actions, needs_reset.tolist(), strict=True)
        for index, (env, action_dict, is_over) in enumerate(stepped):
            if is_over:
                observations, infos = self._reset_env(index, None, None)
                needs_reset[index] = False
                rows.append((observations, {}, {}, {}, infos))
                continue
            if len(histories[index]) < _STEPS_KEPT:
                histories[index].append(action_dict)
            try:
                row = env.step(action_dict)
            except Exception as error:
                observations, infos = self._recovered(index, "step", error)
                rows.append((observations, {}, {}, {}, infos))
                continue
            if type(row) is not tuple or len(row) != 5 or not _DICT.issuperset(map(type, row)):
                row = self._checked(index, row, "step", _STEP_PARTS)
            rows.append(row)
            _, _, terminateds, truncateds, _ = row
            is_ongoing = terminateds.get("__all__") is False and truncateds.get("__all__") is False
            if not is_ongoing and (_says_over(terminateds) or _says_over(truncateds)):
                needs_reset[index] = True
        return rows

    # -- inside --------------------------------------------------------------------------------

    def _note_reset(self, index: int, seed: int | None) -> None:
        self.episode_seeds[index] = seed
        self.episode_actions[index] = []

    def _reset_env(
        self, index: int, seed: int | None, options: dict[str, Any] | None
    ) -> tuple[AgentDict, AgentDict]:
        self._note_reset(index, seed)
        self.is_resetting = True
        try:
            row = self.envs[index].reset(seed=seed, options=options)
        except Exception as error:
            return self._recovered(index, "reset", error)
        finally:
            self.is_resetting = False
        return self._checked(index, row, "reset", _RESET_PARTS)  # type: ignore[no-any-return]

    def _checked(self, index: int, row: object, method: str, names: tuple[str, ...]) -> Any:
        """Check the structure of an environment's return value; infos may be None."""
        where = f"Environment {index} of {self.num_envs}: {method}() returned"
        if not isinstance(row, (tuple, list)) or len(row) != len(names):
            got = f"{len(row)}" if isinstance(row, (tuple, list)) else f"{type(row).__name__} {row!r:.80}"
            raise MultiAgentEnvError(f"{where} {got}, expected {len(names)} values ({', '.join(names)}).")
        row = (*row[:-1], {} if row[-1] is None else row[-1])
        for name, part in zip(names, row, strict=True):
            if not isinstance(part, Mapping):
                raise MultiAgentEnvError(
                    f"{where} {name} that are not a dict by agent id, but {type(part).__name__} {part!r:.80}."
                )
        return row

    def _recovered(self, index: int, where: str, error: Exception) -> tuple[AgentDict, AgentDict]:
        """Replace an environment that raised an error, and return the new one's first observations."""
        attempt: Exception = error
        while True:
            if self.recover is None:
                raise EnvError(
                    f"Environment {index} of {self.num_envs} raised {type(attempt).__name__}: {attempt}"
                ) from attempt
            seed = self.recover(index, where, attempt)
            if index not in self.failed:
                self.failed.append(index)
            self.resetting[index] = True
            self.needs_reset[index] = False
            self.is_resetting = True
            try:
                self.envs[index].close()
            except Exception as close_error:  # it is broken already, and only the new one counts
                error.add_note(f"close() raised {close_error!r}")
            try:
                self._note_reset(index, seed)
                self.envs[index] = self._creators[index]()
                row = self.envs[index].reset(seed=seed, options=None)
            except Exception as again:
                attempt, where = again, "reset"
                continue
            finally:
                self.is_resetting = False
            return self._checked(index, row, "reset", _RESET_PARTS)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close all environments."""
        for env in self.envs:
            env.close()


def _says_over(flags: Mapping[Any, Any]) -> bool:
    """Return whether the episode is over; the episode rejects invalid flags and names their agent."""
    flag = flags.get("__all__")
    if flag is None or flag is False or flag is True:
        return flag is True
    try:
        return as_flag(flag)
    except ValueError:
        return False


def make_multi_agent_vec(
    env: object, *, num_envs: int = 1, mode: object = "sync", context: EnvContext | None = None
) -> SyncVectorMultiAgentEnv:
    """Make a vector of multi-agent environments.

    Args:
        env: Anything that ``resolve_env`` accepts and that makes a `MultiAgentEnv`.
        num_envs: Number of environments, at least 1.
        mode: Must be ``"sync"``.
        context: ``env_config`` and indices; environment i gets a copy with ``vector_index=i``.

    Raises:
        ConfigurationError: The mode is another, or an environment is not multi-agent.
    """
    entry = resolve_env(env)
    context = EnvContext() if context is None else context
    if not isinstance(num_envs, int) or num_envs < 1:
        raise ConfigurationError(f"num_envs_per_env_runner: expected an int >= 1, got {num_envs!r}.")
    mode_name = getattr(mode, "value", mode)
    if mode_name != "sync":
        raise ConfigurationError(
            f"gym_env_vectorize_mode={mode!r}: multi-agent environments are vectorized in mode 'sync' only."
        )

    making = MakingEnvs(num_envs, context)

    def creator(index: int) -> Callable[[], Any]:
        return making.counting(lambda: _make_checked(entry, context.copy_with_overrides(vector_index=index)))

    return SyncVectorMultiAgentEnv([creator(index) for index in range(num_envs)])


def _make_checked(entry: EnvEntry, context: EnvContext) -> object:
    env = make_env(entry, context)
    if not all(hasattr(env, name) for name in ("get_observation_space", "get_action_space")):
        kind = type(getattr(env, "unwrapped", env)).__name__
        raise ConfigurationError(
            f"{entry.label} made a {kind}, which is not multi-agent: expected a rlzmq.MultiAgentEnv. Wrap "
            "PettingZoo environments in PettingZooEnv or ParallelPettingZooEnv; make_multi_agent(...) puts n "
            "agents into copies of a single-agent one."
        )
    return env
