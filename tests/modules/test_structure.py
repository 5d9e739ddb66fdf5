"""StructureCache and parameters_of: what modules hold, listed once, and again after any change."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from rlzmq.modules.weights import StructureCache, parameters_of


def network() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.BatchNorm1d(3), nn.Tanh()))
    module.register_buffer("scale", torch.ones(2))
    return module


def replace_parameter(module: nn.Module) -> None:
    module.get_submodule("0").weight = nn.Parameter(torch.zeros(3, 2))


def add_parameter_where_none_was(module: nn.Module) -> None:
    module.get_submodule("1.1").slope = nn.Parameter(torch.ones(()))


def remove_parameter(module: nn.Module) -> None:
    del module.get_submodule("0").bias


def replace_buffer(module: nn.Module) -> None:
    module.scale = torch.ones(2)


def replace_submodule(module: nn.Module) -> None:
    module.get_submodule("1").register_module("1", nn.Tanh())


CHANGES = [
    replace_parameter,
    add_parameter_where_none_was,
    remove_parameter,
    replace_buffer,
    replace_submodule,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_value_is_computed_again_after_a_change_of_structure_only(
    change: Callable[[nn.Module], None],
) -> None:
    calls: list[int] = []
    cache = StructureCache(
        lambda modules: calls.append(1) or [t for m in modules for t in m.state_dict(keep_vars=True).values()]
    )
    module = network()
    before = cache.of([module])
    module(torch.ones(4, 2)).sum().backward()  # changes a buffer in place
    with torch.no_grad():
        module.get_submodule("0").weight.mul_(2.0)
    assert cache.of([module]) is before
    change(module)
    after = cache.of([module])
    assert len(calls) == 2
    expected = list(module.state_dict(keep_vars=True).values())
    assert len(after) == len(expected)
    assert all(a is b for a, b in zip(after, expected, strict=True))


def test_other_modules_have_another_value() -> None:
    cache = StructureCache(lambda modules: [id(module) for module in modules])
    one, other = network(), network()
    for modules in ([one], [one, other], [other], [], [one]):
        assert cache.of(modules) == [id(module) for module in modules]


def test_parameters_are_listed_once_and_in_the_same_order_as_those_of_a_copy() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    module[1][0].weight = module[0].weight  # a shared one
    module.register_module("nothing", None)
    listed = parameters_of(module)
    assert len(listed) == 4
    assert set(map(id, listed)) == set(map(id, module.parameters()))
    twins = parameters_of(copy.deepcopy(module))
    assert all(torch.equal(one, other) for one, other in zip(listed, twins, strict=True))
