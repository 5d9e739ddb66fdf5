"""LeanAdam is torch's Adam, bit for bit."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from rlzmq.learners.adam import LeanAdam


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


def test_a_closure_is_refused() -> None:
    with pytest.raises(ValueError, match="no closure"):
        LeanAdam([nn.Parameter(torch.ones(1))]).step(lambda: 0)


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
