"""Modules that come and go while a run goes on, in one process and in several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlzmq import PPO, AsyncAlgorithm, ConfigurationError, LearnerGroup, Policy, RLModuleSpec
from rlzmq.envs.examples import module_of_agent
from tests.support.runs import two_agents


def second_to_new(agent_id: Any, episode: Any) -> str:
    return "p0" if agent_id == 0 else "new"


def small(num_env_runners: int = 0, num_learners: int = 0) -> Any:
    processes = {"num_env_runners": num_env_runners, "num_learners": num_learners}
    return two_agents(**processes, train_batch_size_per_learner=120, lr=1e-3, seed=3)


def learners_of(result: dict[str, Any]) -> set[str]:
    return {name for name in result["learners"] if name != "__all_modules__"}


def state_of(algo: Any, module_id: str) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in algo.get_module(module_id).get_state().items()}


def policy_norm(state: dict[str, np.ndarray]) -> float:
    """A mark of the policy head's weights. (Not their sum: a softmax over two actions gives the two gradients of one
    size and opposite signs, Adam steps likewise, and the sum stays as it is but for rounding.)"""
    return float(
        sum(np.square(value).sum() for name, value in sorted(state.items()) if name.startswith("pi"))
    )


def on_runners(algo: Any, module_id: str) -> list[float]:
    def look(runner: Any) -> float:
        return policy_norm(runner.module[module_id].get_state(inference_only=True))

    return algo.env_runner_group.foreach_env_runner(look)  # type: ignore[no-any-return]


async def test_the_async_face_and_a_module_of_other_settings() -> None:
    async with small().build_async() as algo:
        await algo.train()
        await algo.add_module(
            "new",
            RLModuleSpec(model_config={"fcnet_hiddens": [4]}),
            config_overrides={"lr": 0.5},
            new_agent_to_module_mapping_fn=second_to_new,
            new_should_module_be_updated=["new"],
        )
        module = await algo.get_module("new")
        assert module.model_config["fcnet_hiddens"] == [4]
        learner = algo.learner_group.local_learner
        assert learner.config_for_module("new").lr == 0.5
        for _ in range(2):
            result = await algo.train()
        assert learners_of(result) == {"new"}
        await algo.remove_module("new", new_agent_to_module_mapping_fn=module_of_agent)
        await algo.train()


def test_a_fixed_opponent_lives_on_the_runners_only() -> None:
    with small().build() as algo:
        algo.add_module("new", add_to_learners=False, new_agent_to_module_mapping_fn=second_to_new)
        opponent = on_runners(algo, "new")
        for _ in range(3):
            result = algo.train()
        assert "new" not in learners_of(result)
        assert on_runners(algo, "new") == opponent
        algo.evaluate()
        assert on_runners(algo, "p0") == [policy_norm(state_of(algo, "p0"))]


def test_a_callback_may_change_the_league() -> None:
    def grow(*, algorithm: Any, result: dict[str, Any], **kwargs: Any) -> None:
        if result["training_iteration"] == 1:
            algorithm.add_module("new", new_agent_to_module_mapping_fn=second_to_new)
            result["evaluated"] = algorithm.evaluate()["env_runners"]["num_episodes"]

    config = small(1, 1).callbacks(on_train_result=grow).evaluation(evaluation_duration=2)
    with config.build() as algo:
        assert algo.train()["evaluated"] == 2
        algo.train()
        assert "new" in algo.config.module_ids


def test_restoring_brings_back_the_modules(tmp_path: Path) -> None:
    with small().build() as algo:
        path = algo.save_to_path(tmp_path / "two")
        algo.add_module("new", new_agent_to_module_mapping_fn=second_to_new)
        algo.learner_group.set_weights({"new": algo.get_module("p1").get_state()})
        algo.sync_weights()
        assert on_runners(algo, "new") == on_runners(algo, "p1") == [policy_norm(state_of(algo, "p1"))]
        three = algo.save_to_path(tmp_path / "three")
        algo.remove_module("new", new_agent_to_module_mapping_fn=module_of_agent)
        algo.restore_from_path(three)
        assert sorted(algo.config.module_ids) == ["new", "p0", "p1"]
        algo.restore_from_path(path)
        assert sorted(algo.config.module_ids) == ["p0", "p1"]
        algo.train()
        policy = Policy.load(three, config=small(), module_id="new", agent_id=0)
        assert policy.compute_action(np.zeros(4)) in (0, 1)


async def test_frozen_modules_stay_frozen_after_a_restore(tmp_path: Path) -> None:
    with small().build() as algo:
        before = algo.save_to_path(tmp_path / "before")
        algo.add_module("new", new_should_module_be_updated=["p1"])
        frozen = algo.save_to_path(tmp_path / "frozen")
        algo.remove_module("new", new_should_module_be_updated=["p0"])
        algo.restore_from_path(frozen)
        assert algo.config.policies_to_train == ["p1"]
        assert learners_of(algo.train()) == {"p1"}
        algo.restore_from_path(before)
        assert learners_of(algo.train()) == {"p0", "p1"}
    with PPO.from_checkpoint(frozen, config=small()) as restored:
        kept = state_of(restored, "p0")
        assert learners_of(restored.train()) == {"p1"}
        np.testing.assert_equal(state_of(restored, "p0"), kept)
        again = restored.save_to_path(tmp_path / "again")
    async with await AsyncAlgorithm.from_checkpoint(again, config=small()) as restored_again:
        assert learners_of(await restored_again.train()) == {"p1"}
    # What the run itself did not change is the config's.
    other = small().multi_agent(policies_to_train=["p0"])
    with PPO.from_checkpoint(before, config=other) as restored:
        assert learners_of(restored.train()) == {"p0"}


def test_a_function_that_chose_what_is_trained_is_missed(tmp_path: Path, caplog: Any) -> None:
    def choose(module_id: str, batch: Any) -> bool:
        return module_id == "p1"

    with small().build() as algo:
        algo.add_module("new", new_should_module_be_updated=choose)
        path = algo.save_to_path(tmp_path / "c")
    with PPO.from_checkpoint(path, config=small().multi_agent(policies_to_train=choose)) as restored:
        assert learners_of(restored.train()) == {"p1"}
    assert "policies_to_train" not in caplog.text
    PPO.from_checkpoint(path, config=small()).stop()
    assert "Now these are trained: all. Pass config=" in caplog.text


def test_modules_of_the_learners_alone() -> None:
    spec = RLModuleSpec(model_config={"fcnet_hiddens": [8]})
    with small().build() as algo:
        specs = algo.learner_group.add_module(module_id="new", module_spec=spec)
        assert sorted(specs.rl_module_specs) == ["new", "p0", "p1"]
        assert "new" in algo.learner_group.get_weights()
        assert "new" not in algo.env_runner.module
        algo.train()
        algo.learner_group.remove_module("new")
        assert sorted(algo.learner_group.get_weights()) == ["p0", "p1"]
        algo.train()
    config = small()
    config.freeze()
    group = LearnerGroup(config=config, module_spec=config.get_multi_rl_module_spec())
    own = config.get_multi_rl_module_spec()["p0"]
    group.add_module(
        module_id="new",
        module_spec=own,
        config_overrides={"lr": 0.5},
        new_should_module_be_updated=["new"],
    )
    learned = group.foreach_learner(
        lambda learner: [learner.config_for_module("new").lr, learner.should_module_be_updated("p0")]
    )
    assert learned == [[0.5, False]]
    with pytest.raises(ValueError, match="'new' already"):
        group.add_module(module_id="new", module_spec=own)
    assert sorted(group.remove_module("p1").rl_module_specs) == ["new", "p0"]
    with pytest.raises(KeyError, match="p1"):
        group.remove_module("p1")
    group.shutdown()


def test_mistakes_are_named_and_change_nothing() -> None:
    with small().build() as algo:
        with pytest.raises(ValueError, match="already"):
            algo.add_module("p1")
        with pytest.raises(TypeError, match="RLModuleSpec"):
            algo.add_module("new", {"model_config": {}})
        with pytest.raises(ConfigurationError, match="fcnet_hiddens"):
            algo.add_module("new", RLModuleSpec(model_config={"fcnet_hidens": [4]}))
        with pytest.raises(ConfigurationError, match="new_agent_to_module_mapping_fn"):
            algo.remove_module("p1")
        with pytest.raises(KeyError, match="p0"):
            algo.remove_module("p00")
        with pytest.raises(KeyError, match="lr"):
            algo.add_module("new", config_overrides={"lrr": 1})
        assert sorted(algo.config.module_ids) == ["p0", "p1"]
        algo.train()
    single = (
        small().environment("CartPole-v1", env_config={}).multi_agent(policies=None, policy_mapping_fn=None)
    )
    with single.build() as algo, pytest.raises(ConfigurationError, match="single-agent"):
        algo.add_module("new")
