"""Gradients without torch's graph are those of the graph, and torch makes the graph wherever they cannot be."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlzmq.modules.default_models.actor_critic import DefaultActorCriticModule
from rlzmq.modules.default_models.dense_gradients import (
    backward,
    is_recorded,
    recorded,
    tanh_,
    with_known_gradient,
)

OBS = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))


def module_of(activation: str | None = "relu", **model_config: Any) -> DefaultActorCriticModule:
    torch.manual_seed(0)
    return DefaultActorCriticModule(
        observation_space=gym.spaces.Box(-1.0, 1.0, (3,), np.float32),
        action_space=gym.spaces.Box(-1.0, 1.0, (2,), np.float32),
        model_config={"fcnet_hiddens": [5, 4], "fcnet_activation": activation, **model_config},
    )


def loss_of(module: Any, obs: Any = OBS) -> Tensor:
    outputs = module.forward_train({"obs": obs})
    values = module.compute_values({"obs": obs}, embeddings=outputs["embeddings"])
    loss: Tensor = (outputs["action_dist_inputs"].square().sum(-1) * values).mean()
    return loss


def gradients(module: Any, *, record: bool, num_passes: int = 1) -> list[Tensor | None]:
    module.zero_grad(set_to_none=True)
    for _ in range(num_passes):
        if record:
            with recorded():
                loss = loss_of(module)
            backward(loss)
        else:
            loss_of(module).backward()
    return [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("activation", ["relu", "sigmoid", None])
def test_the_gradients_are_the_graphs_bits(activation: str | None, share: bool) -> None:
    module = module_of(activation, vf_share_layers=share, head_fcnet_hiddens=[4])
    with recorded():
        loss = loss_of(module)
    names = graph_of(loss)
    assert not any(name.startswith("Addmm") for name in names)  # so the networks were recorded
    for found, expected in zip(gradients(module, record=True), gradients(module, record=False), strict=True):
        assert torch.equal(found, expected)  # type: ignore[arg-type]


def test_tanh_is_numpys_without_a_graph_and_right_in_both() -> None:
    module = module_of("tanh")
    for found, expected in zip(gradients(module, record=True), gradients(module, record=False), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
    x = torch.linspace(-20.0, 20.0, 1001)
    with torch.no_grad():
        found = tanh_(x.clone())
    torch.testing.assert_close(found, torch.tanh(x), rtol=3e-7, atol=0.0)
    assert np.array_equal(found.numpy(), np.tanh(x.numpy()))


def test_gradients_add_up_over_passes() -> None:
    module = module_of()
    for found, expected in zip(
        gradients(module, record=True, num_passes=2),
        gradients(module, record=False, num_passes=2),
        strict=True,
    ):
        assert torch.equal(found, expected)  # type: ignore[arg-type]


def graph_of(loss: Tensor) -> set[str]:
    names, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None:
            names.add(type(node).__name__)
            todo += [parent for parent, _ in node.next_functions]
    return names


def with_a_parameter_hook(module: Any) -> None:
    module.vf.layers[0].weight.register_hook(lambda gradient: gradient * 2.0)


def with_a_fixed_parameter(module: Any) -> None:
    module.vf.layers[0].bias.requires_grad_(False)


def with_a_layer_of_another_kind(module: Any) -> None:
    module.vf.layers[0] = nn.Sequential(nn.Linear(4, 1), nn.Identity())


def with_a_layer_without_bias(module: Any) -> None:
    module.vf.layers[0] = nn.Linear(4, 1, bias=False)


@pytest.mark.parametrize(
    "change",
    [with_a_parameter_hook, with_a_fixed_parameter, with_a_layer_of_another_kind, with_a_layer_without_bias],
)
def test_a_network_that_needs_the_graph_gets_it_on_top_of_a_recorded_one(change: Any) -> None:
    module = module_of()
    change(module)
    with recorded():
        names = graph_of(loss_of(module))
    assert any(name.startswith(("Addmm", "Mm")) for name in names)
    for found, expected in zip(gradients(module, record=True), gradients(module, record=False), strict=True):
        assert (found is expected is None) or torch.equal(found, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("activation", ["silu", "gelu", "elu"])
def test_activations_whose_derivative_needs_their_input_use_the_graph(activation: str) -> None:
    module = module_of(activation)
    for found, expected in zip(gradients(module, record=True), gradients(module, record=False), strict=True):
        assert torch.equal(found, expected)  # type: ignore[arg-type]


def test_inputs_with_a_gradient_get_it_from_the_graph() -> None:
    module, obs = module_of(), OBS.clone().requires_grad_()
    with recorded():
        loss = loss_of(module, obs)
    (of_obs,) = torch.autograd.grad(loss, obs, create_graph=True)  # a gradient penalty
    backward(of_obs.square().sum())
    assert module.encoder.layers[0].weight.grad is not None


def test_nothing_is_recorded_in_lower_precision_nor_of_sequences() -> None:
    module = module_of()
    with recorded(), torch.autocast("cpu", torch.bfloat16):
        assert graph_of(loss_of(module)) & {"AddmmBackward0"}
    with recorded():
        assert graph_of(loss_of(module, OBS[None])) & {"AddmmBackward0"}


def test_what_an_update_that_failed_has_recorded_is_forgotten() -> None:
    module, other = module_of(), module_of()
    with recorded():
        loss_of(module)
    with recorded():
        loss = loss_of(other)
    backward(loss)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(parameter.grad is not None for parameter in other.parameters())


@pytest.mark.parametrize("is_centred", [False, True])
@pytest.mark.parametrize("factor", [None, 0.5])
def test_a_loss_with_a_known_gradient_needs_no_graph(factor: float | None, is_centred: bool) -> None:
    module = module_of("relu")
    found = []
    for is_known in (True, False):
        module.zero_grad(set_to_none=True)
        with recorded():
            outputs = module.forward_train({"obs": OBS})["action_dist_inputs"]
            if is_centred:
                outputs = outputs - outputs.mean(-1, keepdim=True)
            assert is_recorded(outputs)
            assert not is_recorded(outputs.detach())
            if is_known:
                values = outputs.detach()
                loss = with_known_gradient(values.square().sum(), outputs, 2.0 * values)
                assert loss.grad_fn is None
            else:
                loss = outputs.square().sum()
        assert not is_recorded(outputs)
        backward(loss if factor is None else loss * factor)
        found.append([p.grad for p in module.parameters() if p.grad is not None])
    assert found[0]
    assert all(map(torch.equal, *found))
