"""Modules that come and go while a run goes on: what is trained, what stays, what a checkpoint brings back."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlzmq import (
    PPO,
    Algorithm,
    AsyncAlgorithm,
    ConfigurationError,
    Policy,
    RLModuleSpec,
    TorchRLModule,
)
from rlzmq.algorithms.registry import get_config_class
from rlzmq.envs.examples import module_of_agent
from tests.support.runs import assert_accounted, two_agents, weights_of


def second_to_new(agent_id: Any, episode: Any) -> str:
    return "p0" if agent_id == 0 else "new"


_REPLAYING: dict[str, Any] = {
    "rollout_fragment_length": 20,
    "train_batch_size": 32,
    "num_steps_sampled_before_learning_starts": 40,
    "target_network_update_freq": 40,
    "tau": 0.5,
    "n_step": 2,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"train_batch_size_per_learner": 40, "lr": 1e-3},
    "appo": {
        "train_batch_size_per_learner": 40,
        "lr": 1e-3,
        "rollout_fragment_length": 10,
        "target_network_update_freq": 1,
        "tau": 0.5,
        "circular_buffer_num_batches": 2,
        "circular_buffer_iterations_per_batch": 1,
    },
    "dqn": {**_REPLAYING, "lr": 1e-3},
    "sac": {**_REPLAYING, "actor_lr": 1e-3},
}


def league(algorithm: str, num_env_runners: int = 0, num_learners: int = 0) -> Any:
    """Two agents with a module each, 40 env steps per update."""
    every = {"min_sample_timesteps_per_iteration": 1, "min_time_s_per_iteration": 0, "seed": 3}
    processes = {"num_env_runners": num_env_runners, "num_learners": num_learners}
    return two_agents(config_class=get_config_class(algorithm), **processes, **every, **SETTINGS[algorithm])


def parts_of(algo: Any, module_id: str) -> dict[str, Any]:
    """All that a learner has of a module: weights, target networks too, and the optimizers' state."""
    state = algo.learner_group.get_state()
    return flat({part: state[part].get(module_id, {}) for part in ("rl_module", "optimizer")})


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {name: leaf for key, value in items for name, leaf in flat(value, f"{path}/{key}").items()}
    return {path: np.array(tree)}


def trained_of(result: dict[str, Any]) -> set[str]:
    return {
        name
        for name, values in result["learners"].items()
        if name != "__all_modules__" and values.get("num_module_steps_trained")
    }


def trained_until(algo: Any, module_ids: set[str]) -> dict[str, Any]:
    """Train until an iteration has steps of these modules alone; an agent may be done before the others."""
    for _ in range(12):
        result: dict[str, Any] = algo.train()
        assert_accounted(result)
        if trained_of(result) == module_ids:
            return result
    pytest.fail(f"trained: {trained_of(result)}")


@pytest.mark.parametrize(
    ("algorithm", "processes"),
    [("ppo", (2, 2)), pytest.param("appo", (1, 1), marks=pytest.mark.slow), ("dqn", (0, 0)), ("sac", (0, 0))],
)
def test_modules_come_and_go_in_mid_run_and_after_a_resume(
    algorithm: str, processes: tuple[int, int], tmp_path: Path
) -> None:
    with league(algorithm, *processes).multi_agent(policies_to_train=["p0"]).build() as algo:
        before = {module_id: parts_of(algo, module_id) for module_id in ("p0", "p1")}
        for _ in range(4):
            result = algo.train()
            assert_accounted(result)
        assert trained_of(result) == {"p0"}
        np.testing.assert_equal(parts_of(algo, "p1"), before["p1"], "not a bit, though it plays")
        now = parts_of(algo, "p0")  # more than before: the optimizer's state
        changed = [name for name, value in before["p0"].items() if not np.array_equal(value, now[name])]
        assert any("target" not in name for name in changed)
        assert any("target" in name or "old" in name for name in changed) == (algorithm != "ppo")
        algo.add_module(
            "new",
            new_agent_to_module_mapping_fn=second_to_new,
            new_should_module_be_updated=["p0", "new"],
        )
        added = parts_of(algo, "new")
        trained_until(algo, {"p0", "new"})
        assert parts_of(algo, "new").keys() >= added.keys()
        np.testing.assert_equal(parts_of(algo, "p1"), before["p1"])
        has_buffer = algorithm in ("dqn", "sac")
        if has_buffer:
            (buffer,) = algo.learner_group.foreach_learner(lambda learner: learner.source.buffer)
            held = buffer.get_num_timesteps("p1")
        algo.remove_module("p1")
        result = trained_until(algo, {"p0", "new"})
        with pytest.raises(KeyError, match="p1"):
            algo.get_module("p1")
        if has_buffer:
            assert algo.learner_group.foreach_learner(stored_modules) == [["new", "p0"]]
            assert result["replay_buffer"]["num_agent_steps_not_kept"] >= held > 0
        path = algo.save_to_path(tmp_path / "c")
        saved = {module_id: parts_of(algo, module_id) for module_id in ("p0", "new")}

    original = league(algorithm, *processes).multi_agent(policy_mapping_fn=second_to_new)
    with Algorithm.from_checkpoint(path, config=original) as restored:
        assert sorted(restored.config.module_ids) == ["new", "p0"]
        for module_id, parts in saved.items():
            np.testing.assert_equal(parts_of(restored, module_id), parts)
        trained_until(restored, {"p0", "new"})


def stored_modules(learner: Any) -> list[str]:
    return sorted(learner.source.buffer.buffers)


@pytest.mark.parametrize("use_rows", [True, False])
def test_one_module_may_take_the_place_of_another_between_two_updates(use_rows: bool) -> None:
    with league("ppo").build() as algo:
        algo.env_runner.use_rows = use_rows
        algo.train()
        algo.add_module("new", new_agent_to_module_mapping_fn=second_to_new)
        algo.remove_module("p1")
        for _ in range(2):
            result = algo.train()
            assert_accounted(result)
            assert trained_of(result) == {"p0", "new"}


def test_steps_of_a_module_that_the_learners_do_not_have_are_counted_and_not_stored() -> None:
    with league("dqn").multi_agent(policies_to_train=["p1"]).build() as algo:
        for _ in range(2):
            result = algo.train()
        assert result["replay_buffer"]["num_agent_steps_not_kept"] == 0, "p0 may be trained later"
        assert algo.learner_group.foreach_learner(stored_modules) == [["p0", "p1"]]
        algo.add_module("new", add_to_learners=False, new_agent_to_module_mapping_fn=second_to_new)
        for _ in range(4):
            result = algo.train()
        assert 0 < result["replay_buffer"]["num_agent_steps_not_kept"] <= 4 * 40
        assert algo.learner_group.foreach_learner(stored_modules) == [["p0", "p1"]]
        assert trained_of(result) == {"p1"}, "from what is stored of it"
        # Another module of the same name begins with an empty buffer.
        algo.remove_module("p1", new_should_module_be_updated=["p0"])
        algo.add_module("p1", new_should_module_be_updated=["p1"])
        result = algo.train()
        assert trained_of(result) == set()
        assert_accounted(result)


class WithoutValues(TorchRLModule):
    """A module that neither DQN nor PPO can train."""

    def setup(self) -> None:
        self.net = torch.nn.Linear(4, 2)


@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_a_module_that_the_algorithm_cannot_train_is_refused_and_nothing_changes(algorithm: str) -> None:
    with league(algorithm).build() as algo:
        algo.train()
        needed = "QNetAPI" if algorithm == "dqn" else "ValueFunctionAPI"
        with pytest.raises(ConfigurationError, match=f"'new' .WithoutValues. to be a {needed}") as caught:
            algo.add_module("new", RLModuleSpec(module_class=WithoutValues))
        frames = traceback.extract_tb(caught.tb)
        assert [frame.name for frame in frames[1:]] == ["add_module"], "only the call of the user's"
        assert sorted(algo.config.module_ids) == ["p0", "p1"]
        assert trained_of(algo.train()) == {"p0", "p1"}
        algo.add_module("new", RLModuleSpec(module_class=WithoutValues), add_to_learners=False)


# -- PPO's --------------------------------------------------------------------------------------------


def run_of_two(num_env_runners: int = 0, num_learners: int = 0) -> Any:
    processes = {"num_env_runners": num_env_runners, "num_learners": num_learners}
    return two_agents(**processes, train_batch_size_per_learner=120, lr=1e-3, seed=3)


def acting(algo: Any, module_id: str) -> dict[str, np.ndarray]:
    """The weights that the serial run acts with."""
    return algo.env_runner.module[module_id].get_state(inference_only=True)  # type: ignore[no-any-return]


def assert_acts_with(algo: Any, module_id: str, weights: dict[str, np.ndarray]) -> None:
    mine = acting(algo, module_id)
    np.testing.assert_equal(mine, {name: weights[name] for name in mine})


async def test_the_async_face_and_a_module_of_other_settings() -> None:
    async with run_of_two().build_async() as algo:
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
        assert trained_of(result) == {"new"}
        await algo.remove_module("new", new_agent_to_module_mapping_fn=module_of_agent)
        await algo.train()


def test_a_fixed_opponent_lives_on_the_runners_only() -> None:
    with run_of_two().build() as algo:
        algo.add_module("new", add_to_learners=False, new_agent_to_module_mapping_fn=second_to_new)
        opponent = acting(algo, "new")
        for _ in range(3):
            result = algo.train()
        assert "new" not in trained_of(result)
        assert_acts_with(algo, "new", opponent)
        algo.evaluate()
        assert_acts_with(algo, "p0", weights_of(algo, "p0"))


def test_a_callback_may_change_the_league() -> None:
    def grow(*, algorithm: Any, result: dict[str, Any], **kwargs: Any) -> None:
        if result["training_iteration"] == 1:
            algorithm.add_module("new", new_agent_to_module_mapping_fn=second_to_new)
            result["evaluated"] = algorithm.evaluate()["env_runners"]["num_episodes"]

    config = run_of_two(1, 1).callbacks(on_train_result=grow).evaluation(evaluation_duration=2)
    with config.build() as algo:
        assert algo.train()["evaluated"] == 2
        algo.train()
        assert "new" in algo.config.module_ids


def test_restoring_brings_back_the_modules(tmp_path: Path) -> None:
    with run_of_two().build() as algo:
        path = algo.save_to_path(tmp_path / "two")
        algo.add_module("new", new_agent_to_module_mapping_fn=second_to_new)
        algo.learner_group.set_weights({"new": algo.get_module("p1").get_state()})
        algo.sync_weights()
        for module_id in ("new", "p1"):
            assert_acts_with(algo, module_id, weights_of(algo, "p1"))
        three = algo.save_to_path(tmp_path / "three")
        algo.remove_module("new", new_agent_to_module_mapping_fn=module_of_agent)
        algo.restore_from_path(three)
        assert sorted(algo.config.module_ids) == ["new", "p0", "p1"]
        algo.restore_from_path(path)
        assert sorted(algo.config.module_ids) == ["p0", "p1"]
        algo.train()
        policy = Policy.load(three, config=run_of_two(), module_id="new", agent_id=0)
        assert policy.compute_action(np.zeros(4)) in (0, 1)


async def test_frozen_modules_stay_frozen_after_a_restore(tmp_path: Path) -> None:
    with run_of_two().build() as algo:
        before = algo.save_to_path(tmp_path / "before")
        algo.add_module("new", new_should_module_be_updated=["p1"])
        frozen = algo.save_to_path(tmp_path / "frozen")
        algo.remove_module("new", new_should_module_be_updated=["p0"])
        algo.restore_from_path(frozen)
        assert algo.config.policies_to_train == ["p1"]
        assert trained_of(algo.train()) == {"p1"}
        algo.restore_from_path(before)
        assert trained_of(algo.train()) == {"p0", "p1"}
    with PPO.from_checkpoint(frozen, config=run_of_two()) as restored:
        kept = weights_of(restored, "p0")
        assert trained_of(restored.train()) == {"p1"}
        np.testing.assert_equal(weights_of(restored, "p0"), kept)
        again = restored.save_to_path(tmp_path / "again")
    async with await AsyncAlgorithm.from_checkpoint(again, config=run_of_two()) as restored_again:
        assert trained_of(await restored_again.train()) == {"p1"}
    # What the run itself did not change is the config's.
    other = run_of_two().multi_agent(policies_to_train=["p0"])
    with PPO.from_checkpoint(before, config=other) as restored:
        assert trained_of(restored.train()) == {"p0"}


def test_a_function_that_chose_what_is_trained_is_missed(tmp_path: Path, caplog: Any) -> None:
    def choose(module_id: str, batch: Any) -> bool:
        return module_id == "p1"

    with run_of_two().build() as algo:
        algo.add_module("new", new_should_module_be_updated=choose)
        path = algo.save_to_path(tmp_path / "c")
    with PPO.from_checkpoint(path, config=run_of_two().multi_agent(policies_to_train=choose)) as restored:
        assert trained_of(restored.train()) == {"p1"}
    assert "policies_to_train" not in caplog.text
    PPO.from_checkpoint(path, config=run_of_two()).stop()
    assert "Now these are trained: all. Pass config=" in caplog.text


def test_modules_of_the_learners_alone() -> None:
    spec = RLModuleSpec(model_config={"fcnet_hiddens": [8]})
    with run_of_two().build() as algo:
        specs = algo.learner_group.add_module(module_id="new", module_spec=spec)
        assert sorted(specs.rl_module_specs) == ["new", "p0", "p1"]
        assert "new" in algo.learner_group.get_weights()
        assert "new" not in algo.env_runner.module
        algo.train()
        algo.learner_group.remove_module("new")
        assert sorted(algo.learner_group.get_weights()) == ["p0", "p1"]
        algo.train()


def test_mistakes_are_named_and_change_nothing() -> None:
    with run_of_two().build() as algo:
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
        run_of_two()
        .environment("CartPole-v1", env_config={})
        .multi_agent(policies=None, policy_mapping_fn=None)
    )
    with single.build() as algo, pytest.raises(ConfigurationError, match="single-agent"):
        algo.add_module("new")
