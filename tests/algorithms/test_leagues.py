"""Multi-agent runs of PPO, APPO, DQN and SAC: what is trained, what stays, and modules that come and go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlzmq import (
    Algorithm,
    AlgorithmConfig,
    APPOConfig,
    DQNConfig,
    PPOConfig,
    RLModuleSpec,
    SACConfig,
    TorchRLModule,
    UnsupportedSpaceError,
)
from rlzmq.envs.examples import MultiAgentCartPole, MultiAgentPendulum
from tests.support.runs import assert_accounted

ALGORITHMS = ("ppo", "appo", "dqn", "sac")


def first_two(agent_id: Any, episode: Any) -> str:
    return f"p{agent_id}"


def second_to_new(agent_id: Any, episode: Any) -> str:
    return "p0" if agent_id == 0 else "new"


def league(algorithm: str, num_env_runners: int = 0, num_learners: int = 0) -> AlgorithmConfig:
    """Two agents with a module each, 40 env steps per update."""
    config: Any = {"ppo": PPOConfig, "appo": APPOConfig, "dqn": DQNConfig, "sac": SACConfig}[algorithm]()
    config = (
        config.environment(MultiAgentCartPole, env_config={"num_agents": 2})
        .multi_agent(policies={"p0", "p1"}, policy_mapping_fn=first_two)
        .env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=2)
        .learners(num_learners=num_learners)
        .rl_module(model_config={"fcnet_hiddens": [8]})
        .reporting(min_sample_timesteps_per_iteration=1, min_time_s_per_iteration=0)
        .debugging(seed=3)
    )
    if algorithm in ("ppo", "appo"):
        config.training(train_batch_size_per_learner=40, lr=1e-3)
    else:
        config.env_runners(rollout_fragment_length=20).training(
            train_batch_size=32,
            num_steps_sampled_before_learning_starts=40,
            target_network_update_freq=40,
            tau=0.5,
            n_step=2,
        )
    if algorithm == "ppo":
        config.training(minibatch_size=20, num_epochs=1)
    elif algorithm == "appo":
        config.env_runners(rollout_fragment_length=10).training(
            target_network_update_freq=1,
            tau=0.5,
            circular_buffer_num_batches=2,
            circular_buffer_iterations_per_batch=1,
        )
    elif algorithm == "dqn":
        config.training(lr=1e-3)
    else:
        config.training(actor_lr=1e-3)
    return config  # type: ignore[no-any-return]


def parts_of(algo: Any, module_id: str) -> dict[str, Any]:
    """All that a learner has of a module: weights, target networks too, and the optimizers' state."""
    state = algo.learner_group.get_state()
    return flat({part: state[part].get(module_id, {}) for part in ("rl_module", "optimizer")})


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {name: leaf for key, value in items for name, leaf in flat(value, f"{path}/{key}").items()}
    return {path: np.array(tree)}


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not np.array_equal(one[name], other[name])]


def trained_of(result: dict[str, Any]) -> set[str]:
    return {
        name
        for name, values in result["learners"].items()
        if name != "__all_modules__" and values.get("num_module_steps_trained")
    }


@pytest.mark.parametrize(
    ("algorithm", "processes"),
    [*((name, (0, 0)) for name in ALGORITHMS), ("appo", (1, 1)), ("dqn", (1, 1)), ("ppo", (2, 2))],
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
        assert differing(parts_of(algo, "p1"), before["p1"]) == [], "not a bit, though it plays"
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
        for _ in range(12):
            result = algo.train()
            assert_accounted(result)
            if trained_of(result) == {"p0", "new"}:
                break
        else:
            pytest.fail(f"trained: {trained_of(result)}")
        assert parts_of(algo, "new").keys() >= added.keys()
        assert differing(parts_of(algo, "p1"), before["p1"]) == []
        has_buffer = algorithm in ("dqn", "sac")
        held = algo.learner_group.foreach_learner(num_stored_of_p1)[0] if has_buffer else 0
        algo.remove_module("p1")
        result = algo.train()
        assert_accounted(result)
        assert trained_of(result) == {"p0", "new"}
        with pytest.raises(KeyError, match="p1"):
            algo.get_module("p1")
        if has_buffer:
            assert algo.learner_group.foreach_learner(stored_modules) == [["new", "p0"]]
            assert batch_source(result)["num_agent_steps_not_kept"] >= held > 0
        path = algo.save_to_path(tmp_path / "c")
        saved = {module_id: parts_of(algo, module_id) for module_id in ("p0", "new")}

    original = league(algorithm, *processes).multi_agent(policy_mapping_fn=second_to_new)
    with Algorithm.from_checkpoint(path, config=original) as restored:
        assert sorted(restored.config.module_ids) == ["new", "p0"]
        for module_id, parts in saved.items():
            assert differing(parts_of(restored, module_id), parts) == []
        for _ in range(3):
            result = restored.train()
            assert_accounted(result)
        assert trained_of(result) == {"p0", "new"}


def stored_modules(learner: Any) -> list[str]:
    return sorted(learner.source.buffer.buffers)


def num_stored_of_p1(learner: Any) -> int:
    return int(learner.source.buffer.get_num_timesteps("p1"))


def batch_source(result: dict[str, Any]) -> dict[str, Any]:
    source: dict[str, Any] = result["learners"]["__all_modules__"]["batch_source"]
    return source


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
        assert batch_source(result)["num_agent_steps_not_kept"] == 0, "p0 may be trained later"
        assert algo.learner_group.foreach_learner(stored_modules) == [["p0", "p1"]]
        algo.add_module("new", add_to_learners=False, new_agent_to_module_mapping_fn=second_to_new)
        for _ in range(4):
            result = algo.train()
        assert 0 < batch_source(result)["num_agent_steps_not_kept"] <= 4 * 40
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
        with pytest.raises(TypeError, match=f"needs module 'new' .WithoutValues. to be a {needed}"):
            algo.add_module("new", RLModuleSpec(module_class=WithoutValues))
        assert sorted(algo.config.module_ids) == ["p0", "p1"]
        assert trained_of(algo.train()) == {"p0", "p1"}
        algo.add_module("new", RLModuleSpec(module_class=WithoutValues), add_to_learners=False)


def test_an_action_space_that_the_algorithm_cannot_use_is_named_with_the_module() -> None:
    config = league("dqn").environment(MultiAgentPendulum, env_config={"num_agents": 2})
    with pytest.raises(UnsupportedSpaceError, match=r"(?s)Discrete.*got Box.*module 'p0'"):
        config.build()
