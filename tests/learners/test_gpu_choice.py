"""Which device a learner takes; torch's view of the machine is patched, since few machines have a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlzmq import PPOConfig


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Fake GPU {device.index}")


def _device(rank: int = 0, **settings: Any) -> str:
    config = PPOConfig().environment("CartPole-v1").learners(num_gpus_per_learner="auto", **settings)
    learner_class = config.get_default_learner_class()
    return str(learner_class(config=config, module_spec=config.get_multi_rl_module_spec(), rank=rank).device)


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_that_is_there_is_used_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert _device() == "cuda:0"
    assert "Fake GPU 0" in capsys.readouterr().err
    assert _device(rank=1, num_learners=2) == "cuda:1"
    assert "Fake GPU 1" in capsys.readouterr().err


@pytest.mark.usefixtures("two_gpus")
def test_more_learners_than_gpus_train_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert _device(num_learners=3) == "cpu"
    assert capsys.readouterr().err == ""


def test_without_a_gpu_nothing_changes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _device() == "cpu"
    assert capsys.readouterr().err == ""
