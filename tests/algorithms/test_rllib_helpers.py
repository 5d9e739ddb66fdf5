"""What RLlib's examples import from its utilities, and what they do with checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

import rlzmq
from rlzmq import ConfigurationError, EnvToModulePipeline, MeanStdFilter, tune


@pytest.mark.parametrize("name", ["APPO", "BC", "CQL", "DQN", "IMPALA", "IQL", "MARWIL", "PPO", "SAC", "TQC"])
def test_algorithms_are_found_by_name(name: str) -> None:
    found = rlzmq.get_trainable_cls(name)
    assert found is getattr(rlzmq, name)
    assert type(found.get_default_config()) is getattr(rlzmq, f"{name}Config")


def test_an_unknown_algorithm_is_an_error_that_says_what_to_take() -> None:
    with pytest.raises(ConfigurationError, match=r"No algorithm 'DREAMER'.*PPO or SAC"):
        rlzmq.get_trainable_cls("DREAMER")


def test_modules_can_be_written_with_what_try_import_torch_returns() -> None:
    assert rlzmq.try_import_torch(error=True) == (torch, torch.nn)
    assert torch.Tensor in get_args(rlzmq.TensorType)


def test_an_algorithm_is_restored_from_a_tune_checkpoint(tmp_path: Path) -> None:
    def config() -> rlzmq.PPOConfig:
        return (
            rlzmq.PPOConfig()
            .environment("CartPole-v1")
            .env_runners(num_env_runners=0)
            .training(train_batch_size_per_learner=32, minibatch_size=32, num_epochs=1)
        )

    with config().build_algo() as algo:
        algo.train()
        checkpoint = tune.Checkpoint(algo.save_to_path(tmp_path / "c"))
        weights = algo.get_module().get_state()
    with config().build_algo() as algo:
        algo.restore(checkpoint)
        assert algo.iteration == 1
        for name, array in algo.get_module().get_state().items():
            np.testing.assert_array_equal(array, weights[name])


def test_a_pipeline_from_a_checkpoint_needs_its_pieces(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"Give the pieces \(connectors=\[…\]\), or act with rlzmq.Policy"
    ):
        EnvToModulePipeline.from_checkpoint(tmp_path / "env_runner" / "env_to_module_connector")
    pipeline = EnvToModulePipeline(connectors=[MeanStdFilter()])
    path = pipeline.save_to_path(tmp_path / "p")
    again = EnvToModulePipeline.from_checkpoint(path, connectors=[MeanStdFilter()])
    assert again.get_state().keys() == pipeline.get_state().keys()
