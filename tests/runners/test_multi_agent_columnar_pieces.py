"""Multi-agent sampling and learning with columnar pieces: fused equals per episode, number by number."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from sampling_cases import CALLS, assert_alike

from rlzmq.algorithms.ppo import PPOConfig
from rlzmq.algorithms.ppo.ppo_learner import PPOLearner
from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.env_to_module import (
    FlattenObservations,
    FrameStackingEnvToModule,
    MeanStdFilter,
    PrevActionsPrevRewards,
)
from rlzmq.connectors.learner import ComputeReturnsToGo, FrameStackingLearner
from rlzmq.connectors.rows import TrainRows
from rlzmq.envs.examples import MultiAgentCartPole
from rlzmq.episodes.columns import Columns
from rlzmq.modules.default_models.actor_critic import DefaultActorCriticModule
from rlzmq.modules.multi_rl_module_spec import MultiRLModuleSpec
from rlzmq.modules.spec import RLModuleSpec
from rlzmq.runners.agent_rows import AgentRows
from rlzmq.runners.episode_sampler import EpisodeObjects
from rlzmq.runners.vector_env_runners import MultiAgentEnvRunner, make_env_runner
from tests.episodes.test_episode_wire import received
from tests.learners.test_train_batch import assert_identical, built
from tests.runners.multi_agent_envs import AGENTS, RestlessAgentsEnv, SteadyModule
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


def changing_mapping(agent_id: Any, episode: Any, **kwargs: Any) -> str:
    """Another module in each episode."""
    id_ = getattr(episode, "id_", None) or "0"
    return "one" if (int(id_, 16) + AGENTS.index(agent_id)) % 2 else "two"


MAPPINGS = {
    "fixed": lambda agent_id, episode, **kwargs: "one" if agent_id in ("a", "c") else "two",
    "changing": changing_mapping,
    "shared": lambda agent_id, episode, **kwargs: "one",
}


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
        assert type(fused._sampler._store) is AgentRows
        assert type(real._sampler._store) is EpisodeObjects
        for key in ("num_env_steps", "agent_steps", "num_vector_steps"):
            assert one.meta[key] == two.meta[key]
        left, right = one.meta["episode_metrics"], two.meta["episode_metrics"]
        for key in ("returns", "lengths", "agent_returns", "module_returns"):
            assert left.get(key) == right.get(key), key
        assert_alike(fused.env_to_module.get_state(), real.env_to_module.get_state())


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


def learner_for(config: Any, runner: MultiAgentEnvRunner) -> PPOLearner:
    spec = config.get_multi_rl_module_spec(env=runner.env, spaces=runner.get_spaces())
    learner = PPOLearner(config=config, module_spec=spec)
    learner.build()
    return learner


@pytest.mark.parametrize(
    ("pieces", "mapping", "lstm"),
    [
        ("filter", "changing", True),
        ("previous, flatten, filter, stack", "fixed", False),
        ("previous, flatten, filter, stack", "shared", True),
        ("stack", "changing", False),
    ],
)
def test_the_learners_twin_gives_the_same_on_columns_and_on_episodes(
    pieces: str, mapping: str, lstm: bool
) -> None:
    """On finished and cut episodes, on parts of a fragment, and as they come from the wire."""
    num_frames = 4 if "previous" in pieces else 3
    own: list[ConnectorV2] = [ComputeReturnsToGo(gamma=0.9)]
    if "stack" in pieces:
        own.append(FrameStackingLearner(multi_agent=True, num_frames=num_frames))
    config = make_config(pieces, lstm=lstm, mapping=mapping, num_envs=3, p_death=0.1, learner=lambda: own)
    runner = make_runner(config, fused=True)
    learner = learner_for(config, runner)
    for _ in range(3):
        batch = runner.sample(num_timesteps=23)
        for part in (batch, *batch.split(9), received(batch)):
            fused = built(learner, part, fused=True)
            assert_identical(fused, built(learner, part, fused=False))


@pytest.mark.parametrize("fused", [True, False])
def test_the_learner_sees_what_the_module_acted_on_wherever_fragments_end(fused: bool) -> None:
    """Agents that act only now and then, too, have all their frames at every fragment's begin."""
    seen: list[Any] = []

    class Spy(SteadyModule):
        def _forward(self, batch: Any, **kwargs: Any) -> Any:
            seen.append(batch["obs"].numpy().copy())
            return {"action_dist_inputs": self.layer(batch["obs"][:, :4])}

    def sampled(fragment: int) -> tuple[list[Any], Any]:
        seen.clear()
        twin = FrameStackingLearner(multi_agent=True, num_frames=3)
        config = make_config(
            "stack", env_class=RestlessAgentsEnv, mapping="shared", learner=twin, p_wait=0.6, num_envs=2
        ).rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs={"one": RLModuleSpec(module_class=Spy)}))
        runner = make_runner(config, fused=fused)
        batches = [runner.sample_lease(fragment) for _ in range(60 // fragment)]
        acted_on = list(np.concatenate(seen))
        pipeline = config.build_learner_connector(None, None)
        assert pipeline.on_rows
        learned = []
        for batch in batches:
            for chunks in batch.batches_of("one"):
                rows = TrainRows(chunks, runner.module["one"], "one", torch.device("cpu"))
                learned.append(pipeline.train_columns(rows)["obs"].numpy())
        return acted_on, np.concatenate(learned)

    whole, _ = sampled(60)
    for fragment in (1, 4):
        acted_on, learned = sampled(fragment)
        np.testing.assert_array_equal(acted_on, whole)
        rows = {row.tobytes() for row in acted_on}
        assert len(learned) > 60
        assert all(row.tobytes() in rows for row in learned)


def test_an_agent_that_ends_without_a_last_observation_repeats_it_as_it_was_processed() -> None:
    """Pieces process every observation once: not what is already theirs."""
    for fused in (True, False):
        config = make_config("flatten", space="nested", p_death=0.5, p_wait=0.6)
        repeated = 0
        for episode in make_runner(config, fused=fused).sample(num_timesteps=60):
            for sae in episode.agent_episodes.values():
                observations = np.asarray(sae.observations.data)
                assert observations.shape[1:] == (7,)
                assert sae.observation_space.shape == (7,)
                repeated += bool(sae.is_terminated and (observations[-1] == observations[-2]).all())
        assert repeated > 3


def test_the_episodes_of_envs_that_break_are_the_same_too() -> None:
    config = make_config("previous, flatten, filter, stack", lstm=True, num_envs=3, p_raise=0.06)
    config.fault_tolerance(restart_failed_sub_environments=True, env_failures_per_minute_tolerance=None)
    check(config, PROGRAM)


class PreviousRewardSum(ConnectorV2):
    """A user's piece that works on rows and reads the steps before."""

    writes_episodes = True

    def recompute_output_observation_space(
        self, input_observation_space: Any, input_action_space: Any
    ) -> Any:
        return input_observation_space

    @property
    def required_lookback(self) -> int:
        return 3

    def transform_observations(self, observations: Any, rows: Any) -> Any:
        rewards = rows.window(Columns.REWARDS, 3, current=False).sum(1).astype(np.float32)
        return np.concatenate([observations[:, :-1], rewards[:, None]], axis=1)

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for episode in self.single_agent_episode_iterator(episodes):
            last = episode.get_observations(-1).copy()
            num = min(3, episode.rewards.len_incl_lookback())
            last[-1] = np.float32(sum(episode.get_rewards(slice(-num, None)), 0.0) if num else 0.0)
            episode.set_observations(new_data=last, at_indices=-1)
        return batch


def test_a_users_piece_with_a_row_form_takes_part() -> None:
    check(make_config([PreviousRewardSum], num_envs=3), PROGRAM)


class PutsOutMoreWhileExploring(DefaultActorCriticModule):
    def _forward_exploration(self, batch: Any, **kwargs: Any) -> Any:
        return {**super()._forward_exploration(batch), "mark": torch.full((len(batch["obs"]),), 7.0)}


@pytest.mark.parametrize("num_agents", [1, 2])
@pytest.mark.parametrize("explores_first", [True, False])
def test_a_fragment_has_the_columns_of_its_own_steps(num_agents: int, explores_first: bool) -> None:
    """Exploring and greedy actions within an episode may have different columns, as modules put them out."""
    config = PPOConfig().env_runners(num_envs_per_env_runner=2).debugging(seed=0)
    spec = RLModuleSpec(module_class=PutsOutMoreWhileExploring)
    if num_agents == 1:
        config.environment("CartPole-v1").rl_module(rl_module_spec=spec)
    else:
        config.environment(MultiAgentCartPole, env_config={"num_agents": num_agents})
        config.multi_agent(policies={"p"}, policy_mapping_fn=lambda agent_id, episode, **kwargs: "p")
        config.rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs={"p": spec}))
    with make_env_runner(config, 0) as runner:
        for explore in (explores_first, not explores_first, explores_first):
            for batch in runner.sample(num_timesteps=6, explore=explore).agent_batches:
                assert ("mark" in batch.columns) == explore
                assert not explore or (batch["mark"] == 7).all()
