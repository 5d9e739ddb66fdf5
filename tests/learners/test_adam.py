"""LeanAdam is torch's Adam, bit for bit."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from rlzmq.learners.optimizers import LeanAdam


def step(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    for parameter in module.parameters():
        parameter.grad = None
    module(inputs).square().sum().backward()
    if seed == 1:  # a parameter without a gradient is left alone
        next(module.parameters()).grad = None
    optimizer.step()


@pytest.mark.parametrize("settings", [{}, {"betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.1}])
def test_lean_adam_equals_torchs_fused_adam(settings: dict[str, object]) -> None:
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    two = copy.deepcopy(one)
    lean = LeanAdam(list(one.parameters()), lr=0.1, **settings)  # type: ignore[arg-type]
    plain = torch.optim.Adam(two.parameters(), lr=0.1, fused=True, **settings)  # type: ignore[arg-type]
    for seed in range(4):
        step(one, lean, seed)
        step(two, plain, seed)
    for mine, theirs in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    again = LeanAdam(list(two.parameters()), lr=0.5)
    again.load_state_dict(plain.state_dict())
    step(one, lean, 5)
    step(two, again, 5)
    for mine, theirs in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_each_parameter_counts_the_steps_that_it_took_whatever_replaced_its_state() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = LeanAdam(parameters)

    def step_of(*trained: int) -> list[float]:
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.ones(2) if index in trained else None
        optimizer.step()
        return [float(optimizer.state[p]["step"]) if p in optimizer.state else 0.0 for p in parameters]

    assert step_of(0, 1) == [1, 1, 0]
    assert step_of(0, 1, 2) == [2, 2, 1]
    assert step_of(1) == [2, 3, 1]
    assert step_of(0, 1, 2) == [3, 4, 2]
    saved = copy.deepcopy(optimizer.state_dict())
    assert step_of(0, 2) == [4, 4, 3]
    optimizer.load_state_dict(saved)
    assert step_of(0, 1, 2) == [4, 5, 3]
    optimizer = copy.deepcopy(optimizer)
    parameters = optimizer.param_groups[0]["params"]
    assert step_of(0, 1) == [5, 6, 3]


def test_a_learners_update_and_state_do_not_import_torchs_compiler() -> None:
    code = (
        "import sys\n"
        "from tests.learners.cases import episode_batch, ppo_learner\n"
        "learner = ppo_learner()\n"
        "learner.update(episodes=episode_batch(40, 24))\n"
        "learner.get_state()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
