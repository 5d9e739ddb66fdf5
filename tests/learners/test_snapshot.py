"""UpdateSnapshot: back to the values at its last `take`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlzmq.learners.optimizers import make_adam
from rlzmq.learners.snapshot import UpdateSnapshot


def a_step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    module(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()


def values(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    return [tensor.detach().clone() for tensor in (*module.parameters(), *module.buffers(), *state)]


def test_it_restores_the_values_of_the_last_take_again_and_again() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer, snapshot = make_adam(list(module.parameters()), 0.1), UpdateSnapshot()

    def take() -> list[Tensor]:
        snapshot.take(list(module.parameters()), list(module.buffers()), [optimizer])
        snapshot.complete()
        return values(module, optimizer)

    def check(saved: list[Tensor]) -> None:
        now = values(module, optimizer)
        assert len(now) == len(saved)
        assert all(map(torch.equal, now, saved))

    saved = take()
    a_step(module, optimizer)  # makes the optimizer's state
    snapshot.restore()
    check(saved)
    assert not optimizer.state
    for _ in range(2):
        a_step(module, optimizer)
        saved = take()
        a_step(module, optimizer)
        a_step(module, optimizer)
        snapshot.restore()
        check(saved)
        a_step(module, optimizer)
        snapshot.restore()
        check(saved)


def test_data_that_was_replaced_in_place_of_a_parameter_is_copied_with_its_dtype() -> None:
    module, snapshot = nn.Linear(1, 1), UpdateSnapshot()
    snapshot.take(list(module.parameters()), [], [])
    snapshot.complete()
    module.double()  # same parameters, other data
    with torch.no_grad():
        module.weight.fill_(1.0 + 1e-12)
    snapshot.take(list(module.parameters()), [], [])
    snapshot.complete()
    with torch.no_grad():
        module.weight.zero_()
    snapshot.restore()
    assert module.weight.item() == 1.0 + 1e-12


def test_before_it_is_complete_it_restores_what_forward_passes_change() -> None:
    module, snapshot = nn.BatchNorm1d(2), UpdateSnapshot()
    snapshot.take(list(module.parameters()), list(module.buffers()), [])
    with torch.no_grad():
        module.weight.fill_(2.0)
    module(torch.ones(4, 2))
    assert module.running_mean is not None
    assert module.running_mean.all()
    snapshot.restore()
    assert not module.running_mean.any()
    assert module.weight.eq(2.0).all()
