"""An environment that raises is recreated within its budget; else the error says all that reproduces it."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from sampling_cases import make_config

from rlzmq.core.errors import EnvError, StepFailedRecreateEnvError
from rlzmq.envs.examples import RandomEnv
from rlzmq.runners.vector_env_runners import SingleAgentEnvRunner
from tests.envs.test_vector import NativeEnv
from tests.support.runs import ShortEnv


class FailsAt(ShortEnv):
    """Counts its steps; raises at step ``fails_at`` in the envs of ``failing``."""

    observation_space, length = spaces.Box(-9, 99, (1,)), 20
    made = 0
    error: type[Exception] = RuntimeError

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        type(self).made += 1
        self.fails_at = config["fails_at"] if config.vector_index in config["failing"] else 10**9

    def observation(self) -> Any:
        return np.array([self.t], np.float32)

    def reward(self, action: Any) -> float:
        if self.t == self.fails_at:
            raise self.error("the simulator broke")
        return 1.0


@pytest.fixture
def make_runner(runner_of: Any) -> Any:
    def make(env_config: dict[str, Any], *, num_envs: int = 2, env: Any = FailsAt, **faults: Any) -> Any:
        return runner_of(make_config(env, num_envs=num_envs, env_config=env_config).fault_tolerance(**faults))

    return make


def test_the_completed_part_is_kept_as_truncated_and_a_new_env_goes_on(make_runner: Any, caplog: Any) -> None:
    FailsAt.made = 0
    runner = make_runner({"fails_at": 4, "failing": [1]})
    with caplog.at_level(logging.WARNING, logger="rlzmq.runners"):
        batch = runner.sample_lease(8)
    rows = [
        (int(i), len(e), e.t_started, e.is_truncated) for i, e in zip(batch.env_index, batch, strict=True)
    ]
    # env 1: 3 steps, failure (a reset in its place), 3 steps, and the failure at the last vector step
    assert rows == [(1, 3, 0, True), (1, 3, 0, True), (0, 8, 0, False)]
    for episode in batch:
        assert episode.get_observations()[:, 0].tolist() == list(range(len(episode) + 1))
    assert FailsAt.made == 2 + 2
    assert runner.get_metrics()["num_env_failures_lifetime"] == 2
    assert "the simulator broke" in caplog.text
    assert batch.meta["episode_metrics"]["lengths"] == [3, 3]


def test_a_failure_at_the_border_closes_the_episode_whose_chunks_were_returned(make_runner: Any) -> None:
    runner = make_runner({"fails_at": 4, "failing": [0]})
    first = runner.sample_lease(3)
    second = runner.sample_lease(2)
    assert [(len(e), e.is_done) for e in first] == [(3, False), (3, False)]
    assert [(len(e), e.t_started, e.is_done) for e in second] == [(1, 0, False), (2, 3, False)]
    assert first[0].id_ != second[0].id_
    assert second.meta["episode_metrics"]["lengths"] == [3]
    assert second.num_env_steps == 3


def test_switched_off_the_error_names_env_seed_and_cause(make_runner: Any) -> None:
    runner = make_runner({"fails_at": 2, "failing": [1]}, restart_failed_sub_environments=False)
    with pytest.raises(EnvError, match="Environment 1 of env runner 0") as info:
        runner.sample_lease(5)
    text = str(info.value)
    assert "run seed 7" in text
    assert "restart_failed_sub_environments=True" in text
    assert isinstance(info.value.__cause__, RuntimeError)
    # after the error all begins anew
    runner.config = make_config(FailsAt, env_config={"fails_at": 99, "failing": []})
    runner.make_env()
    assert [e.t_started for e in runner.sample_lease(3)] == [0, 0]


def test_failures_between_finished_episodes_are_not_in_a_row(make_runner: Any) -> None:
    # env 0 finishes an episode every 20 steps, env 1 fails every 15
    runner = make_runner(
        {"fails_at": 15, "failing": [1]},
        num_consecutive_env_runner_failures_tolerance=2,
        env_failures_per_minute_tolerance=None,
    )
    assert runner.sample_lease(200).num_env_steps > 300


def test_an_env_may_ask_to_be_recreated_without_a_log(make_runner: Any, caplog: Any) -> None:
    env: Any = type("Asks", (FailsAt,), {"error": StepFailedRecreateEnvError})
    runner = make_runner({"fails_at": 3, "failing": [0]}, env=env)
    with caplog.at_level(logging.WARNING, logger="rlzmq.runners"):
        runner.sample_lease(4)
    assert runner.failures.num == 1
    assert caplog.text == ""


def test_five_failures_within_a_minute_stop_the_run_and_say_how_to_reproduce_them(make_runner: Any) -> None:
    runner = make_runner({"fails_at": 4, "failing": [1]}, num_envs=2)
    with pytest.raises(EnvError, match="5 failures within 60 s") as info:
        runner.sample_lease(50)
    text, way = str(info.value), info.value.way_there  # type: ignore[attr-defined]
    assert isinstance(info.value.__cause__, RuntimeError)
    assert "Environment 1 of env runner 0 raised RuntimeError in step(): the simulator broke" in text
    assert f"reset(seed={way.seed}), then 4 steps" in text
    assert str(way.actions) in text
    assert runner.failures.num == 5
    assert way.seed == runner.env_seed(1, 4)  # of the environment that replaced the fourth


class Rare(ShortEnv):
    """Episodes of 70 steps; raises when a random number that depends on all actions of the episode is high."""

    observation_space, action_space, length = spaces.Box(-np.inf, np.inf, (1,)), spaces.Discrete(5), 70

    def observation(self) -> Any:
        if not self.t:
            self.x = float(self.np_random.random())
        return np.array([self.x], np.float32)

    def reward(self, action: Any) -> float:
        self.x = (self.x + float(self.np_random.random()) * (1 + int(action))) % 1
        if self.x > 0.998:
            raise LookupError(f"x is {self.x!r}")
        return 0.0


def test_random_state_and_actions_lead_there_again_over_episodes_and_fragments(make_runner: Any) -> None:
    num_lengths = set()
    for seed in range(4):
        runner = make_runner({}, env=Rare, restart_failed_sub_environments=False)
        runner.seed = seed
        with pytest.raises(EnvError, match="To reproduce: reset") as info:  # noqa: PT012
            for _ in range(500):
                runner.sample_lease(11)
        way = info.value.way_there  # type: ignore[attr-defined]
        num_lengths.add(len(way.actions) > 50)
        assert ("actions in the exception" in str(info.value)) == (len(way.actions) > 50)
        env = Rare()
        env.reset(seed=0)
        if way.seed is None:
            env.np_random.bit_generator.state = way.random_state
        env.reset(seed=way.seed)
        done = False
        with pytest.raises(LookupError) as again:  # noqa: PT012
            for action in way.actions:
                if done:
                    env.reset()
                    done = False
                else:
                    done = env.step(action)[2]
        assert str(again.value) == str(info.value.__cause__)
    assert num_lengths == {True, False}


class NativeFailing(NativeEnv):
    num_made = 0

    def __init__(self, num_envs: int = 1) -> None:
        super().__init__(num_envs, AutoresetMode.NEXT_STEP)
        type(self).num_made += 1

    def reset(self, **kwargs: Any) -> Any:
        self.t = 0
        return np.zeros((self.num_envs, 2), np.float32), {}

    def step(self, actions: Any) -> Any:
        self.t += 1
        if self.t == 4 and type(self).num_made == 1:
            raise RuntimeError("whole env broke")
        no = np.zeros(self.num_envs, np.bool_)
        return np.full((self.num_envs, 2), self.t, np.float32), np.ones(self.num_envs), no, no, {}


def test_a_native_env_that_raises_is_made_anew_as_a_whole(make_runner: Any) -> None:
    NativeFailing.num_made = 0
    runner = make_runner({}, env=NativeFailing)
    batch = runner.sample_lease(6)
    assert [(len(e), e.is_truncated) for e in batch] == [(3, True), (3, True), (2, False), (2, False)]
    following = runner.sample_lease(2)
    assert [(len(e), e.t_started) for e in following] == [(2, 2), (2, 2)]
    assert NativeFailing.num_made == 2


class BadAutoreset(NativeFailing):
    def step(self, actions: Any) -> Any:
        observations, rewards, _, no, infos = super().step(actions)
        return observations, rewards, ~no, no, infos


def test_a_vector_env_that_does_not_autoreset_as_it_says_is_refused() -> None:
    NativeFailing.num_made = BadAutoreset.num_made = 5
    runner = SingleAgentEnvRunner(config=make_config(BadAutoreset, num_envs=2))
    with pytest.raises(EnvError, match="directly after another end"):
        runner.sample_lease(3)


class GivesAt(FailsAt):
    """At step 4 of each episode, puts something else into what it returns."""

    gives: tuple[int, Any]

    def step(self, action: Any) -> Any:
        row = list(super().step(action))
        if self.t == 4:
            place, value = self.gives
            row[place] = value
            if isinstance(value, Exception):
                raise value
        return tuple(row)


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        (
            0,
            np.zeros((1, 1), np.float32),
            r"Environment 0 of 2: an observation .*shape \(1, 1\), expected \(1,\)",
        ),
        (0, {"x": 1}, "Environment 0 of 2: an observation .*dict"),
        (1, "1.5", r"(?s)raised ValueError in step\(\): .*one number, got str '1.5'.*To reproduce"),
        (3, 0.5, r"(?s)raised ValueError in step\(\): .*True or False, got float 0.5.*To reproduce"),
        (1, AssertionError(), r"(?s)raised AssertionError in step\(\) \(.* in step\)\. .*To reproduce"),
    ],
)
def test_what_does_not_fit_is_the_envs_failure(make_runner: Any, place: int, value: Any, text: str) -> None:
    GivesAt.gives = (place, value)
    env_config = {"fails_at": 9, "failing": []}
    runner = make_runner(env_config, env=GivesAt, restart_failed_sub_environments=False)
    with pytest.raises(EnvError, match=text):
        runner.sample_lease(6)
    assert runner.sample_lease(3).num_env_steps == 6  # of new episodes, with nothing of that step


class ResetsWithoutSeed(FailsAt):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (
            {"step": lambda self, action: (np.zeros(1), 1.0, False, {})},
            "(observation, reward, terminated, truncated, info)",
        ),
        ({"step": lambda self, action: None}, "(observation, reward, terminated, truncated, info)"),
        ({"reset": lambda self, **kwargs: np.zeros(1)}, "returns (observation, info)"),
        ({"reset": ResetsWithoutSeed.reset}, "def reset(self, *, seed=None, options=None)"),
    ],
)
def test_a_method_of_another_interface_ends_the_run_at_once_and_names_the_right_one(
    make_runner: Any, method: dict[str, Any], expected: str
) -> None:
    env: Any = type("Odd", (FailsAt,), {**method, "made": 0})
    runner = make_runner({"fails_at": 0, "failing": []}, num_envs=1, env=env)
    with pytest.raises(EnvError) as caught:
        runner.sample_lease(4)
    assert expected in str(caught.value)
    assert env.made <= 2  # one for the spaces, one that failed


def test_observations_outside_of_their_space_are_refused_at_the_first_reset() -> None:
    class Outside(RandomEnv):
        def reset(self, **kwargs: Any) -> Any:
            return np.full(3, 7, np.float32), {}

    config = make_config(Outside)
    with pytest.raises(EnvError, match="is not in observation_space"):
        SingleAgentEnvRunner(config=config).sample_lease(1)
    config.environment(disable_env_checking=True)
    assert SingleAgentEnvRunner(config=config).sample_lease(1).num_env_steps == 3
