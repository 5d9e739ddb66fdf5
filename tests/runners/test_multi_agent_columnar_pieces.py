"""Multi-agent sampling and learning with columnar pieces: fused equals per episode, number by number."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from rlzmq.algorithms.ppo import PPOConfig
from rlzmq.connectors.env_to_module import (
    FlattenObservations,
    FrameStackingEnvToModule,
    MeanStdFilter,
    PrevActionsPrevRewards,
)
from rlzmq.modules.multi_rl_module import MultiRLModuleSpec
from rlzmq.modules.spec import RLModuleSpec
from rlzmq.runners.multi_agent_env_runner import MultiAgentEnvRunner
from rlzmq.runners.multi_agent_fused import FusedMultiAgentSampler
from rlzmq.runners.multi_agent_sampler import MultiAgentSampler
from tests.runners.multi_agent_envs import AGENTS, RestlessAgentsEnv
from tests.runners.test_multi_agent_env_runner import assert_equal, make_runner

OBSERVATION_SPACES: dict[str, gym.Space[Any]] = {
    "box": spaces.Box(-5, 5, (3,)),
    "image": spaces.Box(0, 255, (2, 3, 1), np.uint8),
    "discrete": spaces.Discrete(4),
    "nested": spaces.Dict(
        b=spaces.Box(-5, 5, (2,)), a=spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2)))
    ),
}
STACKABLE = ("box", "image")
PIECES: dict[str, list[Any]] = {
    "filter": [lambda: MeanStdFilter(multi_agent=True)],
    "flatten": [lambda: FlattenObservations(multi_agent=True)],
    "previous": [lambda: PrevActionsPrevRewards(multi_agent=True, n_prev_actions=2, n_prev_rewards=3)],
    "stack": [lambda: FrameStackingEnvToModule(multi_agent=True, num_frames=3)],
    "filter, stack": [
        lambda: MeanStdFilter(multi_agent=True),
        lambda: FrameStackingEnvToModule(multi_agent=True, num_frames=2),
    ],
    "previous, flatten, filter, stack": [
        lambda: PrevActionsPrevRewards(multi_agent=True),
        lambda: FlattenObservations(multi_agent=True),
        lambda: MeanStdFilter(multi_agent=True),
        lambda: FrameStackingEnvToModule(multi_agent=True, num_frames=4),
    ],
}


class RestlessObservers(RestlessAgentsEnv):
    """RestlessAgentsEnv with any observations: ``config["space"]``."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.observation_spaces = dict.fromkeys(AGENTS, self.config["space"])

    def _observation(self, agent: str) -> Any:
        return self._drawn(self.config["space"], AGENTS.index(agent))

    def _drawn(self, space: Any, number: int) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: self._drawn(part, number) for key, part in space.spaces.items()}
        if isinstance(space, spaces.Tuple):
            return tuple(self._drawn(part, number) for part in space.spaces)
        if isinstance(space, spaces.Discrete):
            return int(self._random.integers(space.n))
        if space.dtype.kind == "f":
            values = self._random.normal(number, 1 + number, space.shape)
            return np.clip(values, space.low, space.high).astype(space.dtype)
        return self._random.integers(
            0, int(space.high.max()) + 1 if hasattr(space, "high") else 2, space.shape
        ).astype(space.dtype)


def fixed_mapping(agent_id: Any, episode: Any, **kwargs: Any) -> str:
    return "one" if agent_id in ("a", "c") else "two"


def changing_mapping(agent_id: Any, episode: Any, **kwargs: Any) -> str:
    """Another module in each episode."""
    id_ = getattr(episode, "id_", None) or "0"
    return "one" if (int(id_, 16) + AGENTS.index(agent_id)) % 2 else "two"


def shared_mapping(agent_id: Any, episode: Any, **kwargs: Any) -> str:
    return "one"


MAPPINGS = {"fixed": fixed_mapping, "changing": changing_mapping, "shared": shared_mapping}


def make_config(
    pieces: str | list[Any],
    *,
    space: str = "box",
    action: str = "discrete",
    mapping: str = "fixed",
    lstm: bool = False,
    seed: int = 0,
    num_envs: int = 2,
    lookback: int = 1,
    env_class: Any = RestlessObservers,
    learner: Any = None,
    **env_config: Any,
) -> Any:
    made = PIECES[pieces] if isinstance(pieces, str) else pieces
    model: dict[str, Any] = {"fcnet_hiddens": [5], "conv_filters": [[2, 2, 1]]}
    memory = {"use_lstm": True, "lstm_cell_size": 3, "max_seq_len": 4} if lstm else {}
    specs = {"one": RLModuleSpec(model_config={**model, **memory})}
    if mapping != "shared":
        specs["two"] = RLModuleSpec(model_config=dict(model))
    return (
        PPOConfig()
        .environment(
            env_class, env_config={"space": OBSERVATION_SPACES[space], "action": action, **env_config}
        )
        .env_runners(
            num_envs_per_env_runner=num_envs,
            episode_lookback_horizon=lookback,
            env_to_module_connector=lambda env, spaces, device: [make() for make in made],
        )
        .training(learner_connector=learner)
        .multi_agent(policies=set(specs), policy_mapping_fn=MAPPINGS[mapping])
        .rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs))
        .debugging(seed=seed)
    )


def call(runner: MultiAgentEnvRunner, step: dict[str, Any]) -> Any:
    arguments = dict(step)
    lease = arguments.pop("lease", None)
    return runner.sample_lease(lease) if lease else runner.sample(**arguments)


def check(config: Any, program: list[dict[str, Any]]) -> None:
    fused, real = make_runner(config.copy(), fused=True), make_runner(config.copy(), fused=False)
    for step in program:
        one, two = call(fused, step), call(real, step)
        assert_equal(one, two)
        assert type(fused._sampler) is FusedMultiAgentSampler
        assert type(real._sampler) is MultiAgentSampler
        assert one.meta["episode_metrics"]["returns"] == two.meta["episode_metrics"]["returns"]
        assert_same_states(fused.env_to_module.get_state(), real.env_to_module.get_state())


def assert_same_states(left: Any, right: Any) -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert_same_states(value, right[key])
    elif isinstance(left, list):
        for a, b in zip(left, right, strict=True):
            assert_same_states(a, b)
    else:
        np.testing.assert_array_equal(left, right)


PROGRAM: list[dict[str, Any]] = [
    {"num_timesteps": 17},
    {"lease": 1},
    {"lease": 3},
    {"num_timesteps": 6, "random_actions": True},
    {"num_timesteps": 9, "explore": False},
    {"num_episodes": 2},
    {"num_timesteps": 15},
    {"num_timesteps": 7, "random_actions": True, "force_reset": True},
    {"lease": 6},
]


@pytest.mark.parametrize("lstm", [False, True])
@pytest.mark.parametrize("pieces", PIECES)
def test_every_piece_gives_the_same_on_columns_and_on_episodes(pieces: str, lstm: bool) -> None:
    check(make_config(pieces, lstm=lstm, num_envs=3), PROGRAM)


CALLS = st.one_of(
    st.builds(lambda n: {"lease": n}, st.integers(1, 7)),
    st.builds(
        lambda n, explore, random, reset: {
            "num_timesteps": n,
            "explore": explore,
            "random_actions": random,
            "force_reset": reset,
        },
        st.integers(1, 16),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
    st.builds(lambda n: {"num_episodes": n}, st.integers(1, 3)),
)


@settings(max_examples=50, deadline=None)
@given(
    pieces=st.sampled_from(sorted(PIECES)),
    space=st.sampled_from(sorted(OBSERVATION_SPACES)),
    action=st.sampled_from(["discrete", "box", "mixed"]),
    mapping=st.sampled_from(sorted(MAPPINGS)),
    lstm=st.booleans(),
    num_envs=st.integers(1, 3),
    lookback=st.integers(0, 3),
    seed=st.integers(0, 1000),
    chances=st.fixed_dictionaries(
        {
            "p_birth": st.floats(0.1, 0.9),
            "p_death": st.floats(0.0, 0.4),
            "p_wait": st.floats(0.0, 0.7),
            "p_end": st.floats(0.02, 0.3),
        }
    ),
    program=st.lists(CALLS, min_size=1, max_size=5),
)
def test_over_random_agents_spaces_pieces_and_programs(
    pieces: str, space: str, program: list[dict[str, Any]], chances: dict[str, float], **settings: Any
) -> None:
    if pieces.endswith("stack") and "flatten" not in pieces and space not in STACKABLE:
        space = "box"
    if space == "image" and settings["action"] != "discrete":
        settings["action"] = "discrete"
    check(make_config(pieces, space=space, **settings, **chances), program)
