"""Every way to sample gives the same bits: fused, custom pieces only per episode, all pieces per episode."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from sampling_cases import CALLS, assert_same, make_config, random_env_config

from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.env_to_module import (
    FlattenObservations,
    FrameStackingEnvToModule,
    MeanStdFilter,
    PrevActionsPrevRewards,
)
from rlzmq.envs.examples import RandomEnv, StatelessCartPole
from rlzmq.episodes.columns import Columns
from rlzmq.modules.distributions import TorchCategorical
from rlzmq.modules.spec import RLModuleSpec
from rlzmq.runners.episode_sampler import EpisodeSampler
from rlzmq.runners.sampler import RowsSampler
from rlzmq.runners.vector_env_runners import SingleAgentEnvRunner
from tests.connectors.connector_fakes import PassThrough
from tests.envs.test_vector import InfoEnv
from tests.learners.cases import LinearModule


class AddsObservations(ConnectorV2):
    """Fills the obs column itself, so that the default pieces must go on from there."""

    def __call__(self, *, batch: dict[str, Any], episodes: Any, **kwargs: Any) -> dict[str, Any]:
        for episode in self.single_agent_episode_iterator(episodes):
            self.add_batch_item(batch, Columns.OBS, episode.get_observations(-1), episode)
        return batch


PROGRAM: list[dict[str, Any]] = [
    {"num_timesteps": 25},
    {"num_timesteps": 4},
    {"lease": 3},
    {"num_timesteps": 1},
    {"num_episodes": 3},
    {"num_timesteps": 30},
    {"num_timesteps": 7, "random_actions": True},
    {"lease": 9},
    {"num_timesteps": 9, "explore": False},
    {"num_timesteps": 10, "force_reset": True},
    {"num_timesteps": 9, "random_actions": True, "force_reset": True},
    {"lease": 4},
]


def run(config: Any, kind: str, program: list[dict[str, Any]] = PROGRAM) -> tuple[list[Any], dict[str, Any]]:
    """All samples of the program, sampled in one of the ways, and the metrics."""
    pieces = {"hybrid": PassThrough, "default tail": AddsObservations}
    with SingleAgentEnvRunner(config=config) as runner:
        if kind in pieces:
            runner.env_to_module.insert_before("AddObservationsFromEpisodesToBatch", pieces[kind]())
        elif kind == "all pieces":
            runner.module_to_env.insert_after("RemoveSingleTsTimeRankFromBatch", PassThrough())
        samples = []
        for call in program:
            call = dict(call)
            lease = call.pop("lease", None)
            samples.append(runner.sample_lease(lease) if lease else runner.sample(**call))
            expected = RowsSampler if kind == "fused" else EpisodeSampler
            assert type(runner._sampler) is expected
        metrics = runner.get_metrics()
    return samples, {
        key: value
        for key, value in metrics.items()
        if key not in ("sample", "episode_duration_sec_mean", "time_between_sampling")
        and not key.endswith(("_timer", "_connector"))
        and "sum_episodes_length" not in key
    }


def check(config: Any, kinds: tuple[str, ...] = ("hybrid", "all pieces")) -> None:
    fused, metrics = run(config, "fused")
    for kind in kinds:
        other, other_metrics = run(config, kind)
        for a, b in zip(fused, other, strict=True):
            assert_same(a, b)
            assert list(a.env_index) == list(b.env_index)
            for fact in ("num_env_steps", "num_vector_steps", "weights_version"):
                assert a.meta[fact] == b.meta[fact]
            assert a.meta["episode_metrics"]["lengths"] == b.meta["episode_metrics"]["lengths"]
            assert a.meta["episode_metrics"]["returns"] == pytest.approx(b.meta["episode_metrics"]["returns"])
        assert _approx(metrics, other_metrics)


def _approx(a: dict[str, Any], b: dict[str, Any]) -> bool:
    assert a.keys() == b.keys()
    return all(
        _approx(value, b[key]) if isinstance(value, dict) else value == pytest.approx(b[key])
        for key, value in a.items()
    )


SPACES = {
    "bounded box actions": (spaces.Box(-1, 1, (3,)), spaces.Box(-2, 5, (2,))),
    "double precision": (spaces.Box(-1, 1, (2,), np.float64), spaces.Box(-np.inf, np.inf, (1,))),
    "image": (spaces.Box(0, 255, (12, 12, 3), np.uint8), spaces.MultiDiscrete([2, 3])),
}


@pytest.mark.parametrize("name", SPACES)
def test_over_spaces(name: str) -> None:
    check(random_env_config(*SPACES[name]))


def test_with_memory() -> None:
    config = random_env_config(model={"use_lstm": True})
    check(config, ("hybrid", "default tail", "all pieces"))
    check(make_config(StatelessCartPole, model={"use_lstm": True, "vf_share_layers": False}))


PIECES: dict[str, Any] = {
    "stacking": lambda env, spaces, device: FrameStackingEnvToModule(num_frames=3),
    "previous": lambda env, spaces, device: PrevActionsPrevRewards(n_prev_actions=2, n_prev_rewards=3),
    "all": lambda env, spaces, device: [
        PrevActionsPrevRewards(),
        FlattenObservations(),
        MeanStdFilter(clip_by_value=1.0),
        FrameStackingEnvToModule(num_frames=2),
    ],
}


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("lstm", [False, True])
def test_with_columnar_pieces(name: str, lstm: bool) -> None:
    observation_space = spaces.Box(-1, 1, (3, 1)) if name == "stacking" else spaces.Box(-1, 1, (3,))
    config = random_env_config(
        observation_space,
        spaces.Discrete(3),
        env_to_module_connector=PIECES[name],
        model={"use_lstm": True} if lstm else {},
    )
    check(config)


class OwnActions(LinearModule):
    """Gives actions, the env's actions and an extra column itself."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        values = self.layer(batch[Columns.OBS])
        actions = values.argmax(-1)
        return {
            Columns.ACTIONS: actions,
            Columns.ACTIONS_FOR_ENV: 1 - actions,
            "extra": {"values": values, "t": torch.full((len(values),), kwargs.get("t", 0))},
        }


def test_with_a_module_that_acts_by_itself() -> None:
    config = random_env_config().rl_module(rl_module_spec=RLModuleSpec(module_class=OwnActions))
    check(config)
    config = config.copy(copy_frozen=False).env_runners(num_env_runners=4)
    check(config)  # other estimates of t


def test_with_infos() -> None:
    check(make_config(InfoEnv, env_config={"max_episode_steps": 5}, episode_lookback_horizon=2))


def test_with_a_native_and_an_async_vector_env() -> None:
    check(make_config(gym_env_vectorize_mode="vector_entry_point"))
    short = PROGRAM[:3]
    config = make_config(num_envs=2, gym_env_vectorize_mode="async")
    (a, _), (b, _) = run(config, "fused", short), run(config, "hybrid", short)
    (c, _) = run(make_config(num_envs=2), "fused", short)
    for x, y, z in zip(a, b, c, strict=True):
        assert_same(x, y)
        assert_same(x, z)


def test_with_failing_envs() -> None:
    class Failing(RandomEnv):
        count = 0

        def step(self, action: Any) -> Any:
            type(self).count += 1
            if type(self).count % 11 == 0:
                raise RuntimeError("boom")
            return super().step(action)

        def reset(self, **kwargs: Any) -> Any:
            type(self).count += 1
            if type(self).count % 17 == 0:
                raise RuntimeError("no reset")
            return super().reset(**kwargs)

    config = make_config(Failing, env_config={"max_episode_steps": 5, "p_terminated": 0.1})
    config.fault_tolerance(env_failures_per_minute_tolerance=None)
    results = []
    for kind in ("fused", "hybrid", "all pieces"):
        Failing.count = 0
        results.append(run(config, kind))
    assert results[0][1]["num_env_failures_lifetime"] > 5
    for samples, metrics in results[1:]:
        for a, b in zip(results[0][0], samples, strict=True):
            assert_same(a, b)
        assert _approx(metrics, results[0][1])


LEAVES = st.sampled_from(
    [
        spaces.Box(-1, 1, (2,)),
        spaces.Box(-1, 1, (2, 2)),
        spaces.Discrete(3),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary(2),
    ]
)
TREES = st.one_of(
    LEAVES,
    st.builds(lambda a, b: spaces.Dict(z=a, c=b), LEAVES, LEAVES),
    st.builds(lambda a, b: spaces.Tuple((a, spaces.Dict(k=b))), LEAVES, LEAVES),
)


@given(
    observation_space=TREES,
    action_space=TREES,
    num_envs=st.integers(1, 3),
    lookback=st.integers(0, 3),
    pieces=st.lists(st.sampled_from([MeanStdFilter, FlattenObservations]), max_size=2, unique=True),
    lstm=st.booleans(),
    program=st.lists(CALLS, min_size=1, max_size=5),
    kind=st.sampled_from(["hybrid", "default tail", "all pieces"]),
)
def test_over_random_spaces_pieces_and_programs(
    observation_space: Any,
    action_space: Any,
    num_envs: int,
    lookback: int,
    pieces: list[Any],
    lstm: bool,
    program: list[dict[str, Any]],
    kind: str,
) -> None:
    config = random_env_config(
        observation_space,
        action_space,
        num_envs=num_envs,
        episode_lookback_horizon=lookback,
        env_to_module_connector=lambda env, spaces, device: [piece() for piece in pieces],
        model={"use_lstm": True} if lstm else {},
    )
    (a, _), (b, _) = run(config, "fused", program), run(config, kind, program)
    for x, y in zip(a, b, strict=True):
        assert_same(x, y)


class ChecksActions(RandomEnv):
    seen: ClassVar[set[int]] = set()

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.seen.update(action.tolist())
        return super().step(action)


@pytest.mark.parametrize("kind", ["fused", "hybrid", "all pieces"])
@pytest.mark.parametrize(
    "settings", [{"normalize_actions": False}, {"normalize_actions": False, "clip_actions": True}]
)
def test_integer_box_actions_are_the_envs_without_normalising_too(kind: str, settings: Any) -> None:
    config = random_env_config(spaces.Box(-1, 1, (3,)), spaces.Box(-2, 2, (2,), np.int32))
    config.environment(ChecksActions, **settings)
    ChecksActions.seen.clear()
    samples, _ = run(config, kind, [{"num_timesteps": 30}])
    assert ChecksActions.seen == {-2, -1, 0, 1, 2}
    actions = np.concatenate([episode.get_actions() for episode in samples[0]])
    assert (actions.min(), actions.max()) == (0, 4)


class BareState(LinearModule):
    def get_initial_state(self) -> Any:
        return torch.zeros(2)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {**super()._forward(batch), Columns.STATE_OUT: batch[Columns.STATE_IN] + 1}


@pytest.mark.parametrize("kind", ["fused", "hybrid", "all pieces"])
def test_a_state_may_be_a_single_tensor(kind: str) -> None:
    config = random_env_config(spaces.Box(-1, 1, (3,)), spaces.Discrete(2))
    config.rl_module(rl_module_spec=RLModuleSpec(module_class=BareState, model_config={"max_seq_len": 4}))
    samples, _ = run(config, kind, [{"num_timesteps": 20}, {"num_timesteps": 20}])
    for episode in (episode for sample in samples for episode in sample):
        states = episode.get_extra_model_outputs(Columns.STATE_OUT)
        assert states[:, 0].tolist() == [*range(episode.t_started + 1, episode.t + 1)]


class Chooses(LinearModule):
    """Always takes the second action, and says how it would have drawn."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        second = torch.ones(len(batch[Columns.OBS]), dtype=torch.int64)
        return {**super()._forward(batch), Columns.ACTIONS: second}


@pytest.mark.parametrize("kind", ["fused", "all pieces"])
def test_given_actions_get_their_logp_while_exploring(kind: str) -> None:
    config = make_config().rl_module(rl_module_spec=RLModuleSpec(module_class=Chooses))
    samples, _ = run(config, kind, [{"num_timesteps": 20}])
    for episode in samples[0]:
        np.testing.assert_array_equal(episode.get_actions(), np.ones(len(episode)))
        logits = torch.as_tensor(episode.get_extra_model_outputs(Columns.ACTION_DIST_INPUTS))
        expected = TorchCategorical.from_logits(logits).logp(torch.ones(len(episode), dtype=torch.int64))
        logp = episode.get_extra_model_outputs(Columns.ACTION_LOGP)
        np.testing.assert_allclose(logp, expected.numpy(), rtol=1e-6)
