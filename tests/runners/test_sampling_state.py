"""A runner's sampling state, taken to a new runner: it goes on bit for bit as the first one would."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from sampling_cases import facts, make_config, random_env_config
from test_fused_equals_generic import PIECES, AddsObservations, NoOp

from rlzmq.core.checkpoint import read_checkpoint, write_checkpoint
from rlzmq.core.plain import decode, encode
from rlzmq.envs import step_history as positions
from rlzmq.envs.examples import RandomEnv, StatelessCartPole
from rlzmq.runners.single.single_agent_env_runner import SingleAgentEnvRunner
from rlzmq.wire.values import pack_blob, unpack_blob

KINDS = ("fused", "hybrid", "default tail", "all pieces")


def make_runner(config: Any, kind: str = "fused") -> SingleAgentEnvRunner:
    runner = SingleAgentEnvRunner(config=config)
    pieces = {"hybrid": NoOp, "default tail": AddsObservations}
    if kind in pieces:
        runner.env_to_module.insert_before("AddObservationsFromEpisodesToBatch", pieces[kind]())
    elif kind == "all pieces":
        runner.module_to_env.insert_after("RemoveSingleTsTimeRankFromBatch", NoOp())
    return runner


def travelled(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """As it comes back from another process and from a checkpoint."""
    write_checkpoint(folder, {"runner": unpack_blob(pack_blob(state))})
    read: dict[str, Any] = read_checkpoint(folder)["runner"]
    return read


def check(config: Any, folder: Path, kind: str = "fused", num_fragments: int = 6) -> None:
    """After each fragment a new runner takes over; what comes of it equals one runner's samples."""
    with make_runner(config, kind) as runner:
        weights = runner.get_state("rl_module")
        expected = [facts(runner.sample_lease(3 + i % 4), with_ids=False) for i in range(num_fragments)]
        metrics = runner.get_metrics()
    state: dict[str, Any] | None = None
    for index in range(num_fragments):
        with make_runner(config, kind) as runner:
            runner.set_state(weights)
            if state is not None:
                assert runner.set_sampling_state(state) == 0
                again = runner.get_sampling_state()
                assert plain(again) == plain(state)
            batch = runner.sample_lease(3 + index % 4)
            assert facts(batch) == expected[index], index
            state = travelled(runner.get_sampling_state(), folder)
            last = runner.get_metrics()
    names = [name for name in metrics if name.startswith(("num_", "episode_return", "episode_len"))]
    counted = {name for name in names if name.endswith("lifetime") or not name.startswith("num_")}
    assert counted
    assert {name: metrics[name] for name in counted} == {name: last[name] for name in counted}


def plain(value: Any) -> Any:
    """Comparable; without times, and without spaces, whose Dicts may come back in another order."""
    if isinstance(value, dict):
        left_out = ("age_s", "s_s", "duration_s", "_space")
        return {key: plain(item) for key, item in value.items() if not str(key).endswith(left_out)}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_envs", [1, 3])
def test_cartpole_goes_on_bit_for_bit(kind: str, num_envs: int, tmp_path: Path) -> None:
    check(make_config(num_envs=num_envs), tmp_path / "c", kind, 12)


@pytest.mark.parametrize("kind", ["fused", "hybrid"])
def test_a_module_with_memory_goes_on(kind: str, tmp_path: Path) -> None:
    check(make_config(StatelessCartPole, model={"use_lstm": True}), tmp_path / "c", kind)
    check(random_env_config(model={"use_lstm": True}), tmp_path / "d", kind)


@pytest.mark.parametrize("name", PIECES)
def test_connector_pieces_go_on(name: str, tmp_path: Path) -> None:
    config = make_config(env_to_module_connector=PIECES[name], model={"use_lstm": True})
    check(config, tmp_path / "c")
    check(config, tmp_path / "d", "hybrid", 3)


@pytest.mark.parametrize("kind", ["fused", "all pieces"])
def test_nested_spaces_and_an_env_that_saves_its_own_state(kind: str, tmp_path: Path) -> None:
    observation_space = spaces.Dict(
        b=spaces.Box(-1, 1, (2,)), a=spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2)))
    )
    action_space = spaces.Dict(
        x=spaces.Discrete(2), y=spaces.Tuple((spaces.Box(0, 1, (2,)), spaces.MultiDiscrete([2, 3])))
    )
    check(random_env_config(observation_space, action_space), tmp_path / "c", kind)


class NestedActions(gym.Env[Any, Any]):
    """Replayed with actions that are trees."""

    observation_space = spaces.Box(-9, 9, (2,), np.float32)
    action_space = spaces.Dict(
        x=spaces.Discrete(3), y=spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.Discrete(2)))
    )

    def __init__(self, config: Any = None) -> None:
        self.at = np.zeros(2, np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = self.np_random.normal(size=2).astype(np.float32)
        return self.at.clip(-9, 9), {}

    def step(self, action: Any) -> Any:
        noise = self.np_random.normal(size=2).astype(np.float32)
        self.at = self.at + 0.1 * noise + 0.5 * action["y"][0] + 0.1 * float(action["x"])
        return self.at.clip(-9, 9), 1.0, bool(self.np_random.random() < 0.1), False, {}


def test_actions_that_are_trees_are_replayed(tmp_path: Path) -> None:
    check(make_config(NestedActions), tmp_path / "c")


class CannotSay(NestedActions):
    """Has the methods, but they are of no use."""

    def get_state(self) -> Any:
        raise RuntimeError("not today")

    def set_state(self, state: Any) -> None:
        raise AssertionError("nobody calls this")


def test_an_env_that_fails_to_give_its_state_is_replayed(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, logger="rlzmq.envs"):
        check(make_config(CannotSay), tmp_path / "c", num_fragments=3)
    assert "not today" in caplog.text


class Unpredictable(NestedActions):
    """Has randomness that nobody can see."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        _, info = super().reset(seed=seed)
        self.at = np.random.default_rng().normal(size=2).astype(np.float32)
        return self.at.clip(-9, 9), info


@pytest.mark.parametrize("kind", ["fused", "hybrid"])
def test_an_env_that_does_not_arrive_begins_a_new_episode(kind: str, caplog: Any) -> None:
    config = make_config(Unpredictable, num_envs=3)
    with make_runner(config, kind) as one, make_runner(config, kind) as two:
        one.sample_lease(5)
        state = one.get_sampling_state()
        num_ongoing = sum(position["kind"] == "replay" for position in state["envs"])
        ids = {episode.id_ for episode in one.sample_lease(1) if episode.t_started}
        with caplog.at_level(logging.WARNING, logger="rlzmq.runners"):
            assert two.set_sampling_state(state) == num_ongoing
        assert "led to another observation" in caplog.text
        batch = two.sample_lease(6)
        assert not {episode.id_ for episode in batch} & ids
        assert all(episode.t_started == 0 for episode in batch)
        assert batch.num_env_steps < 6 * 3  # the resets took steps
        two.sample_lease(30)


def test_episodes_that_are_too_long_begin_anew(monkeypatch: Any) -> None:
    monkeypatch.setattr(positions, "MAX_REPLAYED_STEPS", 10)
    monkeypatch.setattr(positions, "_STEPS_BETWEEN_BEGINS", 0)
    config = random_env_config(num_envs=2).environment(NestedActions)
    with make_runner(config) as one, make_runner(config) as two:
        one.sample_lease(60)
        state = one.get_sampling_state()
        lengths = state["sampler"]["ongoing"]["steps"]
        kinds = [position["kind"] for position in state["envs"]]
        assert [kind == "unknown" for kind in kinds] == [bool(length > 10) for length in lengths]
        two.set_sampling_state(state)
        two.sample_lease(20)


def test_another_number_of_envs_begins_new_episodes_with_new_seeds(caplog: Any) -> None:
    with make_runner(make_config(num_envs=2)) as one, make_runner(make_config(num_envs=3)) as two:
        first = one.sample_lease(5)
        with caplog.at_level(logging.WARNING, logger="rlzmq.runners"):
            assert two.set_sampling_state(one.get_sampling_state()) == 3
        assert "3 environments begin new episodes after the restore: the state is that of 2" in caplog.text
        other = two.sample_lease(5)
        assert not np.array_equal(first[0].get_observations(0), other[0].get_observations(0))
        assert two.num_env_steps_sampled == first.num_env_steps + other.num_env_steps


def test_a_runner_that_never_sampled_begins_as_ever(tmp_path: Path) -> None:
    with make_runner(make_config()) as one, make_runner(make_config()) as two:
        two.sample_lease(4)
        two.set_sampling_state(travelled(one.get_sampling_state(), tmp_path / "c"))
        assert facts(two.sample_lease(9)) == facts(one.sample_lease(9))


def test_whole_episodes_and_random_actions_go_on(tmp_path: Path) -> None:
    config = make_config(NestedActions)
    for kind in ("fused", "hybrid"):
        with make_runner(config, kind) as one, make_runner(config, kind) as two:
            one.sample(num_timesteps=7, random_actions=True)
            two.set_sampling_state(travelled(one.get_sampling_state(), tmp_path / "c"))
            assert facts(one.sample(num_timesteps=9, random_actions=True)) == facts(
                two.sample(num_timesteps=9, random_actions=True)
            )
            one.sample(num_episodes=3)
            two.set_sampling_state(travelled(one.get_sampling_state(), tmp_path / "c"))
            assert facts(one.sample(num_episodes=4)) == facts(two.sample(num_episodes=4))


def test_the_same_runner_goes_back(tmp_path: Path) -> None:
    with make_runner(make_config()) as runner:
        runner.sample_lease(20)
        state = travelled(runner.get_sampling_state(), tmp_path / "c")
        first = facts(runner.sample_lease(40), with_ids=True)
        assert runner.set_sampling_state(state) == 0
        assert facts(runner.sample_lease(40), with_ids=True) == first


class KeepsThings(NoOp):
    def __call__(self, *, batch: dict[str, Any], shared_data: Any = None, **kwargs: Any) -> dict[str, Any]:
        shared_data["mine"] = object()
        return batch


def test_what_cannot_be_written_down_costs_the_episodes_only(caplog: Any) -> None:
    with make_runner(make_config()) as one, make_runner(make_config()) as two:
        one.env_to_module.prepend(KeepsThings())
        one.sample_lease(5)
        with caplog.at_level(logging.WARNING, logger="rlzmq.runners"):
            state = one.get_sampling_state()
        assert "shared_data['mine']" in caplog.text
        two.set_sampling_state(state)
        assert all(episode.t_started == 0 for episode in two.sample_lease(3))


def test_frozen_values_come_back_with_their_types() -> None:
    import torch

    value = {
        1: (np.float32(2), [torch.ones(2), None]),
        "a": {"dict": np.zeros((0, 2), np.uint8)},
        ("k",): b"x",
    }
    back = decode(unpack_blob(pack_blob(encode(value))))
    assert repr(back) == repr(value)
    with pytest.raises(TypeError, match=r"value\['a'\]"):
        encode({"a": object()})


def test_random_env_is_an_env_with_a_state_of_its_own() -> None:
    env = RandomEnv()
    env.reset(seed=1)
    state = env.get_state()
    first = env.step(0)[0]
    env.set_state(state)
    np.testing.assert_array_equal(env.step(0)[0], first)
