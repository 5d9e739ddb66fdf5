"""Small configs, and how two samples are compared."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from rlzmq.algorithms.ppo import PPOConfig
from rlzmq.envs.examples import RandomEnv
from tests.episodes.multi_agent_model import facts as facts_of

CALLS = st.one_of(
    st.builds(lambda n: {"lease": n}, st.integers(1, 9)),
    st.builds(
        lambda n, explore, random, reset: {
            "num_timesteps": n,
            "explore": explore,
            "random_actions": random,
            "force_reset": reset,
        },
        st.integers(1, 20),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
    st.builds(lambda n: {"num_episodes": n}, st.integers(1, 4)),
)


def make_config(
    env: Any = "CartPole-v1",
    *,
    num_envs: int = 3,
    seed: int | None = 7,
    model: dict[str, Any] | None = None,
    env_config: dict[str, Any] | None = None,
    **env_runners: Any,
) -> Any:
    """A PPOConfig with a tiny net."""
    model_config = {"fcnet_hiddens": [8], "conv_filters": [[4, 4, 2]], **(model or {})}
    if model and model.get("use_lstm"):
        model_config = {"lstm_cell_size": 4, "max_seq_len": 5, **model_config}
    return (
        PPOConfig()
        .environment(env, env_config=env_config or {})
        .env_runners(num_envs_per_env_runner=num_envs, **env_runners)
        .rl_module(model_config=model_config)
        .debugging(seed=seed)
    )


def random_env_config(observation_space: Any = None, action_space: Any = None, **settings: Any) -> Any:
    """A config of RandomEnv with these spaces."""
    spaces = {"observation_space": observation_space, "action_space": action_space}
    episodes = {"p_terminated": 0.15, "max_episode_steps": 6}
    given = {key: space for key, space in spaces.items() if space is not None}
    return make_config(RandomEnv, env_config={**given, **episodes}, **settings)


def facts(episodes: Iterable[Any]) -> list[dict[str, Any]]:
    """All that each episode holds but its id, lookback included, as arrays."""
    arrays = (copy.deepcopy(one).to_numpy() if len(one) else one for one in episodes)
    return [{name: fact for name, fact in facts_of(one).items() if name != "id_"} for one in arrays]


def assert_same(a: Iterable[Any], b: Iterable[Any]) -> None:
    """The two samples hold the same chunks, bit for bit (ids aside)."""
    for index, (x, y) in enumerate(zip(facts(a), facts(b), strict=True)):
        assert x.keys() == y.keys(), index
        for name in x:
            assert x[name] == y[name], (index, name)


def assert_alike(left: Any, right: Any) -> None:
    """Two states of episodes are equal but for durations and spaces; floats may differ in the last digits."""
    with contextlib.suppress(ValueError):  # of arrays
        if left == right:
            return
    if is_dataclass(left):
        left, right = ({each.name: getattr(own, each.name) for each in fields(own)} for own in (left, right))
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left.keys() - {
            "duration_s",
            "agent_to_module_mapping_fn",
            "observation_space",
            "repeated",
        }:
            assert_alike(left[key], right[key])
    elif isinstance(left, list | tuple):
        for one, two in zip(left, right, strict=True):
            assert_alike(one, two)
    else:
        one, two = np.asarray(left), np.asarray(right)
        assert one.dtype == two.dtype
        if one.dtype.kind == "f":
            np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-6)
        else:
            np.testing.assert_array_equal(one, two)
