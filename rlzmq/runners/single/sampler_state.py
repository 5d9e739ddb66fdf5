"""What single-agent samplers carry from one fragment to the next, as plain values and arrays.

The samplers call these with themselves; what they carry is theirs, only how it is written down is here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlzmq.connectors.columnar import VectorStepRows
from rlzmq.core.plain import from_plain
from rlzmq.core.tree import tree_map
from rlzmq.core.typed_values import freeze, thaw
from rlzmq.envs.sync_vector import LeanSyncVectorEnv
from rlzmq.episodes.episode_state import plain_infos, plain_state
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.runners.single.ongoing_episodes import OngoingEpisodes

if TYPE_CHECKING:
    from rlzmq.runners.single.episode_sampler import EpisodeSampler
    from rlzmq.runners.single.fused_sampler import FusedSampler

__all__ = [
    "by_env",
    "check_sampler",
    "get_episode_sampler",
    "get_fused_sampler",
    "keep_actions",
    "set_episode_sampler",
    "set_fused_sampler",
]


def keep_actions(env: Any, actions: Any, num_steps: int, convert: Callable[[Any], Any] | None = None) -> None:
    """The actions of a fragment, for the history of an env that keeps one (see `StepHistory.add`)."""
    if type(env) is LeanSyncVectorEnv and num_steps:
        env.history.add(actions, num_steps, convert)


def by_env(steps: Sequence[Any]) -> Any:
    """Batched actions of T vector steps, leaves ``[N, ...]``, as one tree of arrays ``[N, T, ...]``."""
    return tree_map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves], axis=1), *steps)


def get_fused_sampler(sampler: FusedSampler) -> dict[str, Any]:
    """Of a FusedSampler with ongoing episodes, between two fragments.

    Raises:
        NotPlainError: Something that has no plain form.
    """
    return {
        "kind": "fused",
        "lookback": sampler.lookback,
        "ongoing": sampler._ongoing.get_state(),
        "needs_reset": sampler._needs_reset.copy(),
        "num_previous": sampler._num_previous.copy(),
        "module_state": freeze(sampler._state, "the module's state"),
        "infos": [[*place, plain_infos(info)[0]] for place, info in sampler._carried_infos.items()],
        "columns": freeze(sampler._carried, "columns"),
        "module_observations": freeze(sampler._module_observations, "observations"),
    }


def set_fused_sampler(sampler: FusedSampler, state: Mapping[str, Any], lost: Collection[int]) -> None:
    """Go on from what `get_fused_sampler` gave.

    Args:
        sampler: Fresh, or with other episodes.
        state: As it was given.
        lost: Envs whose episodes do not go on: they are reset in the first vector step.

    Raises:
        ValueError: The state is another kind of sampler's, or of other sizes.
    """
    check_sampler(sampler, state, "fused", len(state["needs_reset"]))
    sampler._ongoing = OngoingEpisodes.from_state(state["ongoing"], sampler.runner.new_episode_id)
    sampler._needs_reset = np.array(state["needs_reset"], np.bool_)
    sampler._num_previous = np.array(state["num_previous"], np.int64)
    sampler._state = thaw(state["module_state"])
    sampler._carried_infos = {
        (index, slot): from_plain(info) for index, slot, info in state["infos"] if index not in lost
    }
    sampler._carried = thaw(state["columns"])
    sampler._module_observations = thaw(state["module_observations"])
    sampler._rows = VectorStepRows({}, sampler.num_envs)
    for index in lost:
        sampler._needs_reset[index] = True
        sampler._ongoing.begin_anew(index)
    sampler.has_episodes = True


def get_episode_sampler(sampler: EpisodeSampler) -> dict[str, Any]:
    """Of an EpisodeSampler with ongoing episodes, between two fragments.

    Raises:
        NotPlainError: Something that has no plain form.
    """
    now = time.perf_counter()
    same = [a is b for a, b in zip(sampler._acting, sampler._episodes, strict=True)]
    return {
        "kind": "episodes",
        "lookback": sampler.lookback,
        "episodes": [plain_state(episode) for episode in sampler._episodes],
        # An env that is about to be reset still acts on the last observation of the episode that ended.
        "acting": [
            None if is_same else plain_state(episode)
            for episode, is_same in zip(sampler._acting, same, strict=True)
        ],
        "prev_chunks": [[plain_state(chunk) for chunk in chunks] for chunks in sampler._prev_chunks],
        "chunk_states": freeze(sampler._chunk_states, "the modules' states"),
        "returns": list(sampler._returns),
        "ages_s": [now - start for start in sampler._started_s],
        "needs_reset": sampler._needs_reset.copy(),
        "starting": sorted(sampler._starting),
        "extra_names": list(sampler._extra_names),
        "last_extras": freeze(sampler._last_extras, "model outputs"),
        "to_module": freeze(sampler._to_module, "the module's batch"),
        "module_observations": freeze(sampler._module_observations, "observations"),
    }


def set_episode_sampler(sampler: EpisodeSampler, state: Mapping[str, Any], lost: Collection[int]) -> None:
    """Go on from what `get_episode_sampler` gave; arguments and errors as of `set_fused_sampler`."""
    check_sampler(sampler, state, "episodes", len(state["episodes"]))
    now = time.perf_counter()
    sampler._episodes = [SingleAgentEpisode.from_state(episode) for episode in state["episodes"]]
    sampler._acting = [
        episode if acting is None else SingleAgentEpisode.from_state(acting)
        for episode, acting in zip(sampler._episodes, state["acting"], strict=True)
    ]
    sampler._prev_chunks = [
        [SingleAgentEpisode.from_state(chunk) for chunk in chunks] for chunks in state["prev_chunks"]
    ]
    sampler._chunk_states = thaw(state["chunk_states"])
    sampler._returns = [float(value) for value in state["returns"]]
    sampler._started_s = [now - age for age in state["ages_s"]]
    sampler._needs_reset = np.array(state["needs_reset"], np.bool_)
    sampler._starting = set(state["starting"])
    sampler._extra_names = tuple(state["extra_names"])
    sampler._last_extras = thaw(state["last_extras"])
    sampler._to_module = thaw(state["to_module"])
    sampler._module_observations = thaw(state["module_observations"])
    for index in lost:
        sampler._needs_reset[index] = True
        sampler._begin_anew(index)
    sampler.has_episodes = True


def check_sampler(sampler: Any, state: Mapping[str, Any], kind: str, num_envs: int) -> None:
    """Raises ValueError: the state is another kind of sampler's, or of other sizes."""
    found = (state["kind"], state["lookback"], num_envs)
    expected = (kind, sampler.lookback, sampler.num_envs)
    if found != expected:
        raise ValueError(f"expected a sampler of kind, lookback and envs {expected}, got {found}")
