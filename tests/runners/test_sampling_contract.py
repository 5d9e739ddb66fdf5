"""What sample() and sample_lease() promise: counts, order, resets, seeds, splits, metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sampling_cases import facts, make_config, random_env_config

from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.core.errors import ClosedError
from rlzmq.envs.examples import RandomEnv
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.modules.spec import RLModuleSpec
from rlzmq.runners.vector_env_runners import SingleAgentEnvRunner
from tests.learners.cases import LinearModule
from tests.support.runs import ShortEnv


class FixedLength(ShortEnv):
    """Episodes of ``env_config["lengths"][vector_index]`` steps; the observation is (env, step)."""

    observation_space = spaces.Box(0, 99, (2,))

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.index = config.vector_index
        self.length = config["lengths"][self.index]

    def observation(self) -> Any:
        return np.array([self.index, self.t], np.float32)


def lengths_config(*lengths: int, **settings: Any) -> Any:
    return make_config(FixedLength, num_envs=len(lengths), env_config={"lengths": list(lengths)}, **settings)


def test_autoreset_steps_do_not_count_and_nothing_is_missing(runner_of: Any) -> None:
    runner = runner_of(lengths_config(3, 100))
    first = runner.sample(num_timesteps=25)
    second = runner.sample(num_timesteps=25)
    # 2 envs; env 0 loses every 4th vector step to its reset: 25 needs 15 vector steps, 30 - 3 resets = 27…
    for batch in (first, second):
        assert 25 <= batch.num_env_steps <= 26
        for episode in batch:
            observations = episode.get_observations()
            assert observations[:, 1].tolist() == list(range(episode.t_started, episode.t + 1))
    joined = [e for batch in (first, second) for e in batch if e.get_observations(0)[0] == 1]
    assert [(e.t_started, e.t) for e in joined] == [(0, joined[0].t), (joined[0].t, joined[1].t)]
    assert joined[0].id_ == joined[1].id_
    assert joined[1].rewards.lookback == 1


def test_order_is_finished_episodes_by_end_then_chunks_by_env(runner_of: Any) -> None:
    runner = runner_of(lengths_config(5, 2, 100, 2))
    batch = runner.sample_lease(6)
    order = [(int(e.get_observations(0)[0]), e.is_done) for e in batch]
    assert order == [(1, True), (3, True), (0, True), (1, True), (3, True), (2, False)]
    assert [int(e.get_observations(0)[0]) for e in batch] == batch.env_index.tolist()


def test_num_episodes_gives_exactly_n_whole_ones_and_resets_before_and_after(runner_of: Any) -> None:
    runner = runner_of(lengths_config(4, 4, 9))
    runner.sample(num_timesteps=5)
    batch = runner.sample(num_episodes=3)
    assert [(len(e), e.t_started, e.is_done) for e in batch] == [(4, 0, True)] * 3
    assert batch.env_index.tolist() == [0, 1, 0]
    assert [e.t_started for e in runner.sample(num_timesteps=3)] == [0, 0, 0]
    assert len(runner.sample(num_episodes=7)) == 7


def test_zero_is_an_empty_list_and_wrong_counts_are_assertion_errors(runner_of: Any) -> None:
    runner = runner_of(make_config())
    assert runner.sample(num_timesteps=0) == []
    assert runner.sample(num_episodes=0) == []
    with pytest.raises(AssertionError, match="not both"):
        runner.sample(num_timesteps=1, num_episodes=1)
    with pytest.raises(AssertionError, match="num_timesteps=-1"):
        runner.sample(num_timesteps=-1)
    with pytest.raises(ValueError, match="num_vector_steps >= 1"):
        runner.sample_lease(0)


def test_without_counts_the_batch_mode_decides(runner_of: Any) -> None:
    runner = runner_of(lengths_config(100, 100, rollout_fragment_length=6))
    assert runner.sample().num_env_steps == 12
    runner = runner_of(lengths_config(3, 4, 5, batch_mode="complete_episodes"))
    assert [len(e) for e in runner.sample()] == [3, 4, 5]


def test_force_reset_begins_new_episodes(runner_of: Any) -> None:
    runner = runner_of(lengths_config(100, 100))
    first = runner.sample(num_timesteps=4)
    second = runner.sample(num_timesteps=4, force_reset=True)
    assert {e.id_ for e in first}.isdisjoint(e.id_ for e in second)
    assert [e.t_started for e in second] == [0, 0]


def test_an_episode_has_random_actions_only_or_none(runner_of: Any) -> None:
    runner = runner_of(lengths_config(100, 100))
    samples = [runner.sample(num_timesteps=6, random_actions=random) for random in (False, True, True, False)]
    ids = [[episode.id_ for episode in sample] for sample in samples]
    assert ids[1] == ids[2]
    assert len({*ids[0], *ids[1], *ids[3]}) == 6
    assert [sample[0].t_started for sample in samples] == [0, 0, 3, 0]


class GreedyTensors(ConnectorV2):
    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {**batch, "actions": batch["action_dist_inputs"].argmax(-1)}


def test_envs_get_arrays_from_a_pipeline_that_ends_with_tensors(runner_of: Any) -> None:
    config = make_config("CartPole-v1", num_envs=2).env_runners(
        module_to_env_connector=lambda env, spaces: GreedyTensors(),
        add_default_connectors_to_module_to_env_pipeline=False,
    )
    assert runner_of(config).sample(num_timesteps=12)[0].get_actions().dtype == np.int64


def test_the_steps_of_the_only_agent_are_env_steps(runner_of: Any) -> None:
    config = lengths_config(100, 100).multi_agent(count_steps_by="agent_steps")
    assert runner_of(config).sample(num_timesteps=12).num_env_steps == 12


@pytest.mark.parametrize("lstm", [False, True])
def test_any_split_into_leases_gives_the_same_trajectories(runner_of: Any, lstm: bool) -> None:
    config = random_env_config(model={"use_lstm": True} if lstm else {}, num_env_runners=2)
    whole: dict[str, list[Any]] = {}
    for split in ([24], [1] * 24, [5, 7, 2, 10], [23, 1]):
        runner = runner_of(config)
        steps: dict[Any, Any] = {}
        for num in split:
            for episode, env in zip(batch := runner.sample_lease(num), batch.env_index.tolist(), strict=True):
                columns = [
                    episode.get_actions(),
                    episode.get_rewards(),
                    episode.get_extra_model_outputs("action_logp"),
                ]
                steps.setdefault((env, episode.id_[20:]), []).append(
                    [np.concatenate(part).tobytes() if part else b"" for part in [[c] for c in columns]]
                )
        by_env: dict[int, list[Any]] = {}
        for (env, _), parts in steps.items():
            by_env.setdefault(env, []).append([b"".join(column) for column in zip(*parts, strict=True)])
        assert whole.setdefault("first", by_env) == by_env  # type: ignore[arg-type,comparison-overlap]


@pytest.mark.parametrize("lengths", [[1] * 20, [3, 1, 2, 8, 9, 1, 20, 2]])
def test_what_is_written_into_a_fragment_is_not_in_the_next(runner_of: Any, lengths: list[int]) -> None:
    fragments = []
    runner = runner_of(lengths_config(4, 50))
    for num_vector_steps in lengths:
        batch = runner.sample_lease(num_vector_steps)
        fragments.append(facts(batch))
        for column in batch.columns.values():
            column[...] = 77
    untouched = runner_of(lengths_config(4, 50))
    assert fragments == [facts(untouched.sample_lease(num)) for num in lengths]


def test_a_lease_out_of_time_ends_with_the_step_at_hand_and_the_next_goes_on_there(runner_of: Any) -> None:
    whole, cut = runner_of(lengths_config(50, 50)), runner_of(lengths_config(50, 50))
    expected = [episode.get_observations().tolist() for episode in whole.sample_lease(12)]
    first = cut.sample_lease(4, max_s=0.0)
    assert (first.meta["num_vector_steps"], first.num_env_steps) == (1, 2)
    rest = cut.sample_lease(11, max_s=60.0)
    assert rest.meta["num_vector_steps"] == 11
    for begin, end, steps in zip(first, rest, expected, strict=True):
        assert begin.get_observations().tolist() + end.get_observations().tolist()[1:] == steps


def test_metrics_are_rllibs_and_count_whole_episodes(runner_of: Any) -> None:
    runner = runner_of(lengths_config(7, 3))
    for _ in range(5):
        runner.sample_lease(5)
    metrics = runner.get_metrics()
    assert metrics["episode_len_max"] == metrics["episode_return_max"] == 7
    assert metrics["episode_len_min"] == 3
    assert metrics["num_episodes"] == metrics["num_episodes_lifetime"] == 3 + 6
    assert metrics["num_env_steps_sampled"] == metrics["num_env_steps_sampled_lifetime"] == 25 - 3 + 25 - 6
    assert metrics["num_module_steps_sampled"] == {"default_policy": 41}
    assert metrics["num_agent_steps_sampled"] == {"default_agent": 41}
    assert metrics["episode_duration_sec_mean"] > 0
    runner.sample_lease(1)
    again = runner.get_metrics()
    assert (again["num_episodes"], again["num_episodes_lifetime"]) == (0, 9)
    assert again["episode_len_max"] == 7  # the window stays


def test_the_episode_keeps_the_modules_or_a_random_action_and_the_env_gets_its_own(runner_of: Any) -> None:
    seen = []

    class Recording(RandomEnv):
        def step(self, action: Any) -> Any:
            seen.append(np.array(action))
            return super().step(action)

    low, high = np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32)
    config = make_config(
        Recording,
        num_envs=1,
        env_config={"action_space": spaces.Box(low, high), "p_terminated": 0.0, "max_episode_steps": 99},
    )
    runner = runner_of(config)
    batch = runner.sample(num_timesteps=20, random_actions=True)
    actions = batch[0].get_actions()
    np.testing.assert_allclose(np.stack(seen), low + (actions + 1) * (high - low) / 2, rtol=1e-5, atol=1e-6)
    seen.clear()
    batch = runner.sample_lease(20)
    actions = batch[0].get_actions()
    expected = np.clip(low + (actions + 1) * (high - low) / 2, low, high)
    np.testing.assert_allclose(np.stack(seen), expected, rtol=1e-6)
    assert np.abs(actions).max() > 1  # really the unclipped ones


class Reuses(ShortEnv):
    """Returns the same arrays and dicts again and again, and changes its actions."""

    observation_space = spaces.Box(0, 99, (1,))
    action_space = spaces.MultiDiscrete([5, 5])

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.array = np.zeros(1, np.float32)
        self.info: dict[str, Any] = {"t": 0, "deep": {"arrays": [self.array]}}

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0], self.info

    def step(self, action: Any) -> Any:
        return *super().step(action)[:-1], self.info

    def observation(self) -> Any:
        self.array[:] = self.info["t"] = self.t
        return self.array

    def reward(self, action: Any) -> float:
        total = float(action.sum())
        action[:] = 0
        return total


class Remembers(LinearModule):
    """Its state is the observation before."""

    def setup(self) -> None:
        self.layer = torch.nn.Linear(1, 10)

    def get_initial_state(self) -> Any:
        return {"before": torch.full((1,), -1.0)}

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        before = batch["state_in"]["before"]
        state_out = {"before": batch["obs"][:, -1]}
        return {**super()._forward(batch), "seen": before.unsqueeze(1), "state_out": state_out}


def test_values_are_those_of_their_step_although_the_env_reuses_and_changes_them(runner_of: Any) -> None:
    config = make_config(Reuses, num_envs=2)
    config.rl_module(rl_module_spec=RLModuleSpec(module_class=Remembers, model_config={"max_seq_len": 4}))
    runner = runner_of(config)
    for episode in (episode for _ in range(3) for episode in runner.sample(num_timesteps=8)):
        times = list(range(episode.t_started, episode.t + 1))
        infos = episode.get_infos()
        assert episode.get_observations()[:, 0].tolist() == times
        assert [info["t"] for info in infos] == [info["deep"]["arrays"][0][0] for info in infos] == times
        assert episode.get_actions().sum(-1).tolist() == episode.get_rewards().tolist()
        assert episode.get_extra_model_outputs("seen")[:, 0].tolist() == [t - 1 for t in times[:-1]]


def test_seeds_decide_the_trajectories(runner_of: Any) -> None:
    def sample(seed: int | None, worker_index: int = 0, incarnation: int = 0) -> Any:
        config = make_config(seed=seed)
        with SingleAgentEnvRunner(
            config=config, worker_index=worker_index, incarnation=incarnation
        ) as runner:
            return facts(runner.sample_lease(30))

    assert sample(1) == sample(1) == sample(1, worker_index=1)  # the local runner is runner 1
    others = [sample(2), sample(1, worker_index=2), sample(1, incarnation=1), sample(None), sample(None)]
    assert all(other != sample(1) for other in others)
    assert others[-1] != others[-2]


def test_sampling_leaves_the_global_random_streams_alone(runner_of: Any) -> None:
    import random

    runner = runner_of(make_config())
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    runner.sample(num_timesteps=20)
    runner.sample(num_timesteps=20, random_actions=True)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


class Late(LinearModule):
    """Adds an output from the fourth call on."""

    num_calls = -1000  # so long as it is only tried out

    def _forward(self, batch: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        logits = self.layer(batch["obs"])
        return {"action_dist_inputs": logits, **({"late": logits} if self.num_calls > 3 else {})}


def test_late_and_missing_outputs_are_refused_at_the_step(runner_of: Any) -> None:
    runner = runner_of(make_config().rl_module(rl_module_spec=RLModuleSpec(module_class=Late)))
    runner.module.num_calls = 0
    with pytest.raises(ValueError, match="'late'"):
        runner.sample_lease(10)
    runner.module._forward = lambda batch, **kwargs: {"values": 1}
    with pytest.raises(ValueError, match="action_dist_inputs"):
        runner.sample_lease(1)


def test_a_stopped_runner_says_so_and_stops_once(runner_of: Any) -> None:
    runner = runner_of(make_config())
    runner.assert_healthy()
    runner.stop()
    runner.stop()
    for call in (runner.sample, runner.assert_healthy, lambda: runner.sample_lease(1)):
        with pytest.raises(ClosedError):
            call()


def test_samples_are_a_list_that_on_sample_end_may_change(runner_of: Any) -> None:
    seen: list[Any] = []

    def keep_the_longest_twice(*, samples: Any, **kwargs: Any) -> None:
        assert isinstance(samples, list)
        seen.extend(samples)
        samples.sort(key=len)
        del samples[:-1]
        samples += samples

    runner = runner_of(lengths_config(3, 5).callbacks(on_sample_end=keep_the_longest_twice))
    samples = runner.sample(num_timesteps=20)
    assert isinstance(samples, EpisodeBatch)
    assert len(samples) == 2
    assert [len(episode) for episode in samples] == [max(map(len, seen))] * 2
    assert samples.meta["num_env_steps"] == samples.num_env_steps == 2 * max(map(len, seen))
    assert ([] + samples)[0] is samples[0]  # noqa: RUF005
    lease = runner.sample_lease(10)
    assert EpisodeBatch.from_wire(*lease.to_wire()).num_env_steps == lease.num_env_steps == 2 * len(lease[0])


def test_what_on_sample_end_adds_to_a_lease_is_left_out(
    runner_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def twice(*, samples: Any, **kwargs: Any) -> None:
        samples += samples

    runner = runner_of(lengths_config(3, 5).callbacks(on_sample_end=twice))
    limit = 10 * runner.num_envs
    assert runner.sample_lease(10).num_env_steps > limit
    assert "of a lease" not in caplog.text
    batch = runner.take_fragment(10)
    assert batch.num_env_steps == batch.meta["num_env_steps"] == limit
    assert f"env steps of a lease of {limit}; the last" in caplog.text
