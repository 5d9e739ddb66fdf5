"""Several optimizers, clipping, torch.compile with each algorithm's learner; devices, and a script that checks them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlzmq import ConfigurationError, PPOConfig
from scripts import check_gpu
from tests.learners.all_algorithms import (
    ALGORITHMS,
    NUM_OPTIMIZERS,
    REPLAYING,
    config_of,
    record_pendulum,
    trained,
    weights_of,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_pendulum(tmp_path_factory.mktemp("data"))


class TwoOptimizers:
    """Mix-in: every other parameter has an optimizer that takes no steps."""

    def configure_optimizers_for_module(self: Any, module_id: str, config: Any) -> None:
        parameters = [p for p in self.get_parameters(self.module[module_id]) if p.requires_grad]
        for name, lr, mine in (("moving", 0.1, parameters[::2]), ("still", 0.0, parameters[1::2])):
            self.register_optimizer(
                module_id=module_id,
                optimizer_name=name,
                optimizer=torch.optim.SGD(mine, lr=lr),
                params=mine,
                lr_or_lr_schedule=lr,
            )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_optimizer_steps_its_parameters_at_its_rate(algorithm: str, data: Path) -> None:
    learner, before, result = trained(config_of(algorithm, data, TwoOptimizers))
    after = weights_of(learner)
    names = [name for name, p in learner.module["default_policy"].named_parameters() if p.requires_grad]
    assert all(torch.equal(after[name], before[name]) for name in names[1::2])
    assert not all(torch.equal(after[name], before[name]) for name in names[::2])
    assert (result["moving_learning_rate"], result["still_learning_rate"]) == (0.1, 0.0)
    assert result["gradients_moving_global_norm"] > 0.0


class OneOptimizer:
    """Mix-in: an optimizer of some parameters, besides the algorithm's or alone."""

    chosen, is_alone = slice(-1), True

    def configure_optimizers_for_module(self: Any, module_id: str, config: Any) -> None:
        if not self.is_alone:
            super().configure_optimizers_for_module(module_id, config)  # type: ignore[misc]
        mine = self.get_parameters(self.module[module_id])[self.chosen]
        optimizer = torch.optim.SGD(mine, lr=0.1)
        self.register_optimizer(module_id=module_id, optimizer_name="own", optimizer=optimizer, params=mine)


def test_parameters_without_an_optimizer_are_named_and_those_with_two_refused(
    data: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = trained(config_of("ppo", data, OneOptimizer))[0]
    last = [name for name, _ in learner.module["default_policy"].named_parameters()][-1]
    assert f"1 of its parameters have no optimizer, so they are never trained: {last}." in caplog.text
    monkeypatch.setattr(OneOptimizer, "is_alone", False)
    with pytest.raises(ValueError, match="'default_optimizer' of module 'default_policy' steps"):
        trained(config_of("ppo", data, OneOptimizer))


def test_td_errors_that_are_not_one_per_row_are_refused(data: Path) -> None:
    learner = trained(config_of("dqn", data))[0]
    for errors in (torch.zeros(4, 2), torch.zeros(3)):
        with pytest.raises(ValueError, match="expected one TD error per row"):
            learner.note_td_errors("default_policy", {"replay_key": torch.arange(4)}, errors)


class NotesGradients:
    """Mix-in: keeps what the optimizers get, by optimizer."""

    def apply_gradients(self: Any, gradients_dict: dict[Tensor, Tensor]) -> None:
        self.noted = [
            [g.clone() for g in self.filter_param_dict_for_optimizer(gradients_dict, optimizer).values()]
            for _, optimizer in self.get_optimizers_for_module("default_policy")
        ]
        super().apply_gradients(gradients_dict)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("algorithm", "grad_clip_by"),
    [*[(name, "global_norm") for name in ALGORITHMS], *product(("ppo", "sac"), ("value", "norm"))],
)
def test_the_gradients_of_each_optimizer_are_clipped(
    algorithm: str, grad_clip_by: str, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    most = 1e-4
    config = config_of(algorithm, data, NotesGradients, grad_clip=most, grad_clip_by=grad_clip_by)
    learner, _, result = trained(config.training(adam_epsilon=1e-5))
    assert len(learner.noted) == NUM_OPTIMIZERS.get(algorithm, 1)
    assert "have no optimizer" not in caplog.text
    for (name, optimizer), gradients in zip(
        learner.get_optimizers_for_module("default_policy"), learner.noted, strict=True
    ):
        assert optimizer.param_groups[0]["eps"] == 1e-5
        if result[f"gradients_{name}_global_norm"] <= 100 * most:
            continue  # it may have been small enough
        if grad_clip_by == "value":
            norms = [max(float(g.abs().max()) for g in gradients)]
        elif grad_clip_by == "norm":
            norms = [max(float(g.norm()) for g in gradients)]
        else:
            norms = [float(torch.cat([g.flatten() for g in gradients]).norm())]
        assert norms == pytest.approx([most], rel=1e-3), name


@pytest.mark.parametrize("algorithm", [*REPLAYING, "cql", "iql"])
def test_a_complete_update_with_target_networks_is_not_compiled(algorithm: str, data: Path) -> None:
    config = config_of(algorithm, data).framework(
        torch_compile_learner=True, torch_compile_learner_what_to_compile="complete_update"
    )
    with pytest.raises(ConfigurationError, match="Use 'forward_train'"):
        config.validate()


# -- devices -------------------------------------------------------------------------------------------


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
def test_more_learners_than_gpus_train_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _device(num_learners=3) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _device() == "cpu", "there is none"
    assert capsys.readouterr().err == ""


# -- scripts/check_gpu.py ------------------------------------------------------------------------------


def test_the_checks_pass_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    checks = ["serial", "group", "update-time"]
    assert check_gpu.main(["--cpu", "--only", *checks]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[1:]] == checks


@pytest.mark.slow
def test_all_checks_pass_on_the_cpu() -> None:
    assert set(ALGORITHMS) <= check_gpu.CHECKS.keys()
    assert check_gpu.main(["--cpu"]) == 0


def test_a_failed_check_fails_the_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(check_gpu.CHECKS, "group", lambda place: str(1 // 0))
    assert check_gpu.main(["--cpu", "--only", "group"]) == 1
    captured = capsys.readouterr()
    assert "group: FAILED" in captured.out
    assert "ZeroDivisionError" in captured.err


def test_without_a_gpu_nothing_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_gpu.main([]) == 0
    assert "no GPU here" in capsys.readouterr().out
