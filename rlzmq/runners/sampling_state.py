"""The sampling state of an env runner: all that it needs to continue exactly as if it had never stopped.

Besides weights and connectors (`EnvRunnerState`) these are its random streams, its counters, its environments'
positions (`rlzmq.envs.env_state`), and its sampler's data for the next fragment. Only plain values and arrays are
saved. Anything else, e.g. objects in ``shared_data``, is left out, and new episodes begin.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rlzmq.core.plain import NotPlainError, decode, encode, encode_supported
from rlzmq.envs.multi_agent_vector import SyncVectorMultiAgentEnv
from rlzmq.envs.rng_state import set_space_random_state, space_random_state
from rlzmq.envs.sync_vector import LeanSyncVectorEnv

__all__ = ["get_sampling_state", "set_sampling_state"]

_log = logging.getLogger("rlzmq.runners")
_WITH_POSITIONS = (LeanSyncVectorEnv, SyncVectorMultiAgentEnv)
_COUNTERS = (
    "_needs_seed",
    "_num_env_steps_lifetime_base",
    "_num_env_steps_since_base",
    "_num_envs_made",
    "num_env_failures",
    "_num_failures_in_a_row",
    "_id_prefix",
    "_num_episode_ids",
)


def get_sampling_state(runner: Any, *, with_episodes: bool = True) -> dict[str, Any]:
    """See `EnvRunnerState.get_sampling_state`."""
    sampler = getattr(runner, "_sampler", None)
    sampler_state, shared_data = None, None
    has_episodes = with_episodes and getattr(sampler, "has_episodes", False)
    if sampler is not None and has_episodes and hasattr(sampler, "get_state"):
        try:
            sampler_state = sampler.get_state()
            shared = {key: value for key, value in runner.shared_data.items() if key != "generator"}
            shared_data = encode(shared, "shared_data")
        except NotPlainError as error:
            sampler_state = None
            _log.warning("Env runner %d: its episodes cannot be saved: %s", runner.worker_index, error)
    positions = None
    if type(runner.env) in _WITH_POSITIONS:
        positions = runner.env.get_env_states(has_episodes=sampler_state is not None)
    return {
        "num_envs": runner.num_envs,
        "counters": {name: getattr(runner, name) for name in _COUNTERS if hasattr(runner, name)},
        "generator": runner.generator.get_state().numpy().copy(),
        "action_space": space_random_state(runner.random_action_space),
        "episode_metrics": runner.episode_metrics.get_state(),
        "metrics": encode_supported(runner.metrics.get_state()),
        "connectors": {
            name: _plain_part(runner, f"the state of its {name}", pipeline.get_state)
            for name, pipeline in runner._pipelines().items()
            if pipeline is not None
        },
        "envs": positions,
        "sampler": sampler_state,
        "shared_data": shared_data,
    }


def set_sampling_state(runner: Any, state: Mapping[str, Any]) -> int:
    """See `EnvRunnerState.set_sampling_state`."""
    counters = state["counters"]
    for name, value in counters.items():
        if hasattr(runner, name):
            setattr(runner, name, value)
    runner.generator.set_state(torch.from_numpy(np.array(state["generator"], np.uint8)))
    set_space_random_state(runner.random_action_space, state["action_space"])
    runner.episode_metrics.set_state(state["episode_metrics"])
    runner.metrics.set_state(decode(state["metrics"]))
    for name, pipeline in runner._pipelines().items():
        if pipeline is not None and state["connectors"].get(name) is not None:
            pipeline.reset_state()
            pipeline.set_state(decode(state["connectors"][name]))
    runner._drop_unfinished_episodes()
    return _set_episodes(runner, state)


def _set_episodes(runner: Any, state: Mapping[str, Any]) -> int:
    """Restore environments and sampler; return the number of environments that begin new episodes."""
    positions, num_envs = state["envs"], int(runner.num_envs)
    if positions is None or type(runner.env) not in _WITH_POSITIONS or len(positions) != num_envs:
        if runner._needs_seed:  # the environments have never been reset
            return 0
        # Different numbers than at the start of the run, but the same for every runner that restores this state.
        runner._needs_seed = True
        runner._seed_coordinates = (int(runner.num_env_steps_sampled) & 0x7FFFFFFF, 1, 0)
        _log.warning(
            "Env runner %d: its %d environments begin new episodes after the restore: %s.",
            runner.worker_index,
            num_envs,
            _why_no_positions(runner, positions),
        )
        return num_envs
    replay = runner.env.set_env_states(positions)
    why, num_lost = replay.why, len(replay.lost)
    if state["sampler"] is not None:
        sampler = runner._choose_sampler()
        try:
            sampler.set_state(state["sampler"], replay.lost)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            sampler.forget()
            why, num_lost = f"the sampler's state does not fit this config ({error})", num_envs
        else:
            runner.shared_data.clear()
            runner.shared_data.update(decode(state["shared_data"]))
            runner.shared_data["generator"] = runner.generator
    if num_lost:
        _log.warning(
            "Env runner %d: %d of %d environments begin new episodes after the restore: %s.",
            runner.worker_index,
            num_lost,
            num_envs,
            why,
        )
    return num_lost


def _why_no_positions(runner: Any, positions: Any) -> str:
    if type(runner.env) not in _WITH_POSITIONS:
        return f"gym_env_vectorize_mode={str(runner.config.gym_env_vectorize_mode)!r} does not allow restoring them"
    if positions is None:
        return "the state does not contain their positions"
    return f"the state is that of {len(positions)} environments"


def _plain_part(runner: Any, what: str, get: Any) -> Any:
    try:
        return encode(get(), what)
    except NotPlainError as error:
        _log.warning("Env runner %d: %s cannot be saved: %s", runner.worker_index, what, error)
        return None
