"""Learner, LearnerGroup, EnvRunner and connector pieces saved and restored by themselves, and out of an algorithm's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlzmq import (
    CheckpointError,
    LearnerGroup,
    MeanStdFilter,
    PPOTorchLearner,
    SingleAgentEnvRunner,
)
from tests.support.runs import small


def config(num_learners: int = 0) -> Any:
    return small(
        num_learners=num_learners,
        model_config={"fcnet_hiddens": [4]},
        env_to_module_connector=lambda env, spaces, device: MeanStdFilter(),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A trained run: its checkpoint, and those of its parts."""
    folder = tmp_path_factory.mktemp("run")
    with config().build() as algo:
        algo.train()
        paths = {
            "algorithm": algo.save_to_path(folder / "algorithm"),
            "learner_group": algo.learner_group.save_to_path(folder / "learner_group"),
            "learner": algo.learner_group.foreach_learner(
                lambda learner: learner.save_to_path(folder / "learner")
            )[0],
            "env_runner": algo.env_runner.save_to_path(folder / "env_runner"),
            "module": str(algo.get_module().save_to_path(folder / "module")),
            "pipeline": algo.env_runner.env_to_module.save_to_path(folder / "pipeline"),
        }
        return {
            **paths,
            "learner_state": algo.learner_group.get_state(),
            "runner_state": algo.env_runner.get_state(),
        }


def new_learner() -> Any:
    return config().build_learner()


@pytest.mark.parametrize("which", ["learner", "learner_group", "algorithm"])
def test_a_learner_takes_its_state_from_any_of_them(run: dict[str, Any], which: str) -> None:
    learner = new_learner()
    learner.restore_from_path(run[which])
    np.testing.assert_equal(learner.get_state(), run["learner_state"])


def test_a_learner_takes_a_part_alone(run: dict[str, Any]) -> None:
    weights = run["learner_state"]["rl_module"]
    in_run = Path(run["algorithm"]) / "learner_group" / "learner" / "rl_module"
    for path, component in (
        (run["module"], "rl_module/default_policy"),
        (in_run / "default_policy", "rl_module/default_policy"),
        (run["learner"], "rl_module"),
        (in_run, "rl_module"),
    ):
        learner = new_learner()
        learner.restore_from_path(path, component=component)
        np.testing.assert_equal(learner.get_state("rl_module")["rl_module"], weights)
        assert learner.weights_seq_no == 0
    learner.restore_from_path(run["algorithm"], component="optimizer")
    np.testing.assert_equal(learner.get_state("optimizer")["optimizer"], run["learner_state"]["optimizer"])


def test_new_ones_are_made_from_checkpoints(run: dict[str, Any]) -> None:
    spec = config().get_multi_rl_module_spec()
    learner = PPOTorchLearner.from_checkpoint(run["learner"], config=config(), module_spec=spec)
    np.testing.assert_equal(learner.get_state(), run["learner_state"])
    group = LearnerGroup.from_checkpoint(run["algorithm"], config=config(), module_spec=spec)
    np.testing.assert_equal(group.get_state(), run["learner_state"])
    runner = SingleAgentEnvRunner.from_checkpoint(run["env_runner"], config=config())
    np.testing.assert_equal(runner.get_state(), run["runner_state"])
    runner.stop()
    in_run = Path(run["algorithm"]) / "env_runner"
    runner = SingleAgentEnvRunner(config=config())
    runner.restore_from_path(in_run)
    states = [runner.env_to_module.get_state()]
    runner.stop()
    for path in (run["pipeline"], in_run / "env_to_module_connector"):
        pipeline = config().build_env_to_module_connector()
        pipeline.restore_from_path(path)
        states.append(pipeline.get_state())
    for state in states:
        np.testing.assert_equal(state, run["runner_state"]["env_to_module_connector"])


def test_what_is_not_there_is_named(run: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="has no component 'learner_group/learner'"):
        new_learner().restore_from_path(run["pipeline"])
    with pytest.raises(CheckpointError, match="has no component 'connector'"):
        config().build_env_to_module_connector().restore_from_path(run["learner"])


def test_learner_processes_save_and_restore(run: dict[str, Any], tmp_path: Path) -> None:
    group = config(num_learners=2).build_learner_group()
    try:
        group.restore_from_path(run["algorithm"])
        path = group.save_to_path(tmp_path / "group")
        for state in group.foreach_learner(lambda learner: learner.get_state("rl_module")):
            np.testing.assert_equal(state["rl_module"], run["learner_state"]["rl_module"])
    finally:
        group.shutdown()
    learner = new_learner()
    learner.restore_from_path(path)
    np.testing.assert_equal(learner.get_state("optimizer")["optimizer"], run["learner_state"]["optimizer"])
