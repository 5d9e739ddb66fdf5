"""A run in one process: results, checkpoints, custom steps, callbacks; its synchronous and asynchronous classes."""

from __future__ import annotations

import asyncio
import inspect
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlzmq import PPO, CheckpointError, ClosedError, RLlibCallback
from rlzmq.algorithms.algorithm import Algorithm
from rlzmq.algorithms.async_algorithm import AsyncAlgorithm
from rlzmq.algorithms.ppo import PPOConfig
from rlzmq.driver.async_env_runner_group import AsyncEnvRunnerGroup
from rlzmq.driver.async_learner_group import AsyncLearnerGroup
from rlzmq.driver.sync_groups import EnvRunnerGroup, LearnerGroup
from rlzmq.runners.episode_metrics import HOW_TO_LIMIT
from rlzmq.telemetry.view import summary_line
from tests.support.runs import ShortEnv, assert_accounted, weights_of
from tests.support.runs import small as small_run


def small(seed: int = 1, env: Any = "CartPole-v1") -> Any:
    sizes = {"num_envs_per_env_runner": 4, "train_batch_size_per_learner": 200, "minibatch_size": 50}
    return small_run(env=env, seed=seed, num_epochs=2, lr=1e-3, **sizes)


async def test_the_async_face_gives_the_same_weights() -> None:
    async with small().build_async() as algo:
        async for result in algo.results():
            if result["training_iteration"] == 2:
                break
        asynchronous = dict((await algo.get_module()).get_state())
    with small().build() as algo:
        algo.train()
        algo.train()
        np.testing.assert_equal(asynchronous, weights_of(algo))


def test_a_torn_checkpoint_changes_nothing(tmp_path: Path) -> None:
    with small().build() as algo:
        path = Path(algo.save_to_path(tmp_path / "c"))
        algo.train()
        before = weights_of(algo)
        victim = next(path.rglob("state.safetensors"))
        victim.write_bytes(victim.read_bytes()[:-4])
        with pytest.raises(CheckpointError, match="torn"):
            algo.restore_from_path(path)
        np.testing.assert_equal(weights_of(algo), before)


def test_code_in_a_checkpoints_config_is_asked_for(tmp_path: Path) -> None:
    config = small().callbacks(on_train_result=lambda **kwargs: None)
    with config.build() as algo:
        path = algo.save_to_path(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"callbacks_hooks(.|\n)*callbacks_hooks=…"):
        PPO.from_checkpoint(path)
    PPO.from_checkpoint(path, config=config).stop()
    PPO.from_checkpoint(path, callbacks_hooks={}).stop()


def log_ends(*, episode: Any, metrics_logger: Any, **kwargs: Any) -> None:
    metrics_logger.log_value("ends", 1, reduce="sum")
    metrics_logger.log_value("all_ends", 1, reduce="lifetime_sum")
    metrics_logger.log_value("lengths", len(episode), reduce="item_series")


def test_evaluation_counts_apart_and_is_greedy_by_request() -> None:
    config = small().evaluation(
        evaluation_interval=2, evaluation_duration=3, evaluation_config={"explore": False}
    )
    config.callbacks(on_episode_end=log_ends)
    with config.build() as algo:
        assert "evaluation" not in algo.train()
        result = algo.train()
        assert result["evaluation"]["env_runners"]["num_episodes"] == 3
        assert result["accounting"]["trained"] >= 400
        assert result["env_runners"]["all_ends"] == result["env_runners"]["num_episodes_lifetime"]
        rounds = [result["evaluation"], algo.evaluate(), algo.evaluate()]
    num_steps = 0
    for num, one in enumerate((round_["env_runners"] for round_ in rounds), start=1):
        num_steps += one["num_env_steps_sampled"]
        assert (one["num_episodes"], one["num_episodes_lifetime"]) == (3, 3 * num)
        assert one["num_env_steps_sampled_lifetime"] == num_steps
        assert (one["ends"], one["all_ends"]) == (3, 3 * num)
        assert one["lengths"] == one["hist_stats"]["episode_len"]


def test_a_custom_training_step_in_five_lines() -> None:
    class Mine(PPO):
        def training_step(self) -> None:
            episodes = self.env_runner_group.sample(num_timesteps=200)
            self.learner_group.update(episodes=episodes)
            self.sync_weights()
            self.metrics.log_value("mine", 7)

    with Mine(small().callbacks(on_episode_end=log_ends)) as algo:
        before = weights_of(algo)
        result = algo.train()
        assert result["mine"] == 7
        assert result["env_runners"]["ends"] == result["env_runners"]["num_episodes"] > 0
        assert result["learners"]["default_policy"]["weights_seq_no"] == 1
        assert any((before[name] != after).any() for name, after in weights_of(algo).items())
        on_runner = algo.env_runner.module.get_state(inference_only=True)
        np.testing.assert_equal(on_runner, {name: weights_of(algo)[name] for name in on_runner})
        assert_accounted(result)


def test_a_training_step_must_return_none() -> None:
    class Wrong(PPO):
        def training_step(self) -> Any:
            return {}

    with Wrong(small()) as algo, pytest.raises(ValueError, match=r"expected None.*metrics"):
        algo.train()


def test_callbacks_fire_with_the_algorithm() -> None:
    seen: list[str] = []

    def on_result(*, algorithm: Any, result: dict[str, Any], **kwargs: Any) -> None:
        seen.append(type(algorithm).__name__)
        result["extra"] = 1

    class First(RLlibCallback):
        def on_train_result(self, **kwargs: Any) -> None:
            seen.append("class")

    config = small().callbacks(
        callbacks_class=[First],
        on_algorithm_init=lambda **kw: seen.append("init"),
        on_train_result=[on_result, lambda **kw: seen.append("second")],
        on_episode_end=lambda *, metrics_logger, **kw: metrics_logger.log_value("ends", 1, reduce="sum"),
    )
    with config.build() as algo:
        result = algo.train()
    assert seen == ["init", "class", "PPO", "second"]
    assert result["extra"] == 1
    assert result["env_runners"]["ends"] == result["env_runners"]["num_episodes"]


def test_iterations_last_as_long_as_asked() -> None:
    config = small().reporting(min_sample_timesteps_per_iteration=500)
    with config.build() as algo:
        result = algo.train()
    assert result["num_training_step_calls_per_iteration"] == 3


def test_a_stopped_algorithm_says_so() -> None:
    algo = small().build()
    algo.stop()
    algo.stop()
    for call in (algo.train, algo.get_module, algo.get_state):
        with pytest.raises(ClosedError, match="was stopped"):
            call()


def test_an_algorithm_that_was_not_started_says_so() -> None:
    algo = small().build_async()
    for call in (algo.train, algo.get_module, algo.evaluate):
        with pytest.raises(ClosedError, match=r"not started.*await algo.start\(\)"):
            asyncio.run(call())


def test_an_algorithm_is_not_pickled() -> None:
    with small().build() as algo, pytest.raises(TypeError, match="Pickle its config"):
        pickle.dumps(algo)


def test_what_callbacks_log_under_evaluation_joins_the_evaluation() -> None:
    def log(*, metrics_logger: Any, evaluation_metrics: dict[str, Any], **kwargs: Any) -> None:
        length = evaluation_metrics["env_runners"]["episode_len_mean"]
        metrics_logger.log_value(("evaluation", "mine"), length)
        metrics_logger.log_value(("evaluation", "env_runners", "mine"), 2.0)
        metrics_logger.log_value(("evaluation", "env_runners", "episode_len_mean"), -1.0)

    config = small().evaluation(evaluation_interval=1, evaluation_duration=2).callbacks(on_evaluate_end=log)
    with config.build() as algo:
        evaluation = algo.train()["evaluation"]
    assert evaluation["mine"] == evaluation["env_runners"]["episode_len_mean"] > 0
    assert evaluation["env_runners"]["mine"] == 2.0


class Endless(ShortEnv):
    length = math.inf


LIMIT = f"limit them: {HOW_TO_LIMIT}"


def endless(**evaluation: Any) -> Any:
    return small_run(env=Endless, train_batch_size_per_learner=1500, minibatch_size=1500).evaluation(
        **evaluation
    )


def test_without_a_return_the_readmes_lines_cope_and_one_hint_says_why(caplog: Any, capsys: Any) -> None:
    with endless(evaluation_duration=20, evaluation_duration_unit="timesteps").build() as algo:
        for _ in range(4):
            result = algo.train()
            assert not result["env_runners"]["episode_return_mean"] >= 450
        evaluated = algo.evaluate()["env_runners"]
    print(result["env_runners"]["episode_return_mean"], evaluated["episode_return_mean"])
    assert capsys.readouterr().out == "nan nan\n"
    assert "episode_return_mean" not in result["env_runners"]
    assert result["env_runners"].get("episode_len_max") is None
    with pytest.raises(KeyError, match="episode_retrun_mean"):
        result["env_runners"]["episode_retrun_mean"]
    assert summary_line(result).startswith(
        "iter 4  return – (no episode has ended)  episodes 0  steps 6000  "
    )
    assert caplog.messages == [
        "No episode has ended in 4500 env steps (2250 in each environment), so there is no episode_return_mean. "
        f"If they never end, {LIMIT}."
    ]


PAIRS = [
    (Algorithm, AsyncAlgorithm),
    (EnvRunnerGroup, AsyncEnvRunnerGroup),
    (LearnerGroup, AsyncLearnerGroup),
]
# What a run calls, not its user.
NOT_FOR_USERS = {
    AsyncAlgorithm: {"start"},
    AsyncEnvRunnerGroup: {
        "cancel_calls", "change_modules", "begin_again", "get_connector_deltas", "sample_batches",
        "set_connector_state", "set_module_states", "set_weights", "spawn_runner", "start",
    },
    AsyncLearnerGroup: {"change_modules", "get_inference_weights", "start"},
}  # fmt: skip


@pytest.mark.parametrize(("sync", "asynchronous"), PAIRS)
def test_every_coroutine_method_has_a_synchronous_one_with_its_signature(
    sync: Any, asynchronous: Any
) -> None:
    missing = []
    for name, method in inspect.getmembers(asynchronous, inspect.iscoroutinefunction):
        if name.startswith("_") or name in NOT_FOR_USERS[asynchronous]:
            continue
        found = getattr(sync, name, None)
        if found is None:
            missing.append(name)
        elif getattr(found, "__wrapped__", None) is method:
            assert inspect.signature(found) == inspect.signature(method)
            assert found.__doc__ == method.__doc__
            assert not inspect.iscoroutinefunction(found)
    assert missing == []


def test_attributes_are_read_from_the_asynchronous_object_and_cannot_be_replaced() -> None:
    assert "iterations" in str(Algorithm.iteration.__doc__)
    with PPOConfig().environment("CartPole-v1").build() as algo:
        assert algo.iteration == algo.training_iteration == 0
        assert algo.env_runner is algo.env_runner_group.local_env_runner
        with pytest.raises(AttributeError, match=r"PPO\.iteration can only be read"):
            algo.iteration = 3
