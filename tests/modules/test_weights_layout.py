"""WeightsLayout: one block of bytes, the same on learner and runner, refused when it does not fit."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from rlzmq.modules.default_models.actor_critic import DefaultActorCriticModule, acting_chain
from rlzmq.modules.multi_rl_module_spec import MultiRLModuleSpec
from rlzmq.modules.rl_module import TorchRLModule
from rlzmq.modules.spec import RLModuleSpec
from rlzmq.modules.weights import WeightsLayout

OBS = gym.spaces.Box(-1.0, 1.0, (3,))


class Mixed(TorchRLModule):
    """Parameters and buffers of several types and awkward sizes."""

    def setup(self) -> None:
        self.norm = nn.BatchNorm1d(3)
        self.brain = nn.Parameter(torch.randn(3).to(torch.bfloat16))
        self.precise = nn.Parameter(torch.randn((), dtype=torch.float64))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("empty", torch.zeros(0, 4))

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"action_dist_inputs": self.norm(batch["obs"])}


def specs(**kwargs: Any) -> MultiRLModuleSpec:
    def one(**more: Any) -> RLModuleSpec:
        return RLModuleSpec(
            observation_space=OBS,
            action_space=gym.spaces.Discrete(2),
            model_config={"fcnet_hiddens": [5], "vf_share_layers": False},
            **more,
        )

    odd = RLModuleSpec(Mixed, OBS, gym.spaces.Discrete(3))
    modules = {"z": one(), "a/b": one(), "odd": odd, "curiosity": one(learner_only=True)}
    return MultiRLModuleSpec(modules, **kwargs)


def randomize(module: Any) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape))
        if "odd" in module:
            module["odd"].norm.num_batches_tracked.fill_(7)


def test_a_block_carries_learner_weights_to_an_inference_only_copy() -> None:
    learner, runner = specs().build(seed=0), specs(inference_only=True).build(seed=1)
    randomize(learner)
    sender, receiver = WeightsLayout.of(learner), WeightsLayout.of(runner)
    assert sender.digest == receiver.digest
    assert sender.num_bytes == receiver.num_bytes
    assert sender.names == sorted(sender.names)
    assert not any("vf" in name or "curiosity" in name for name in sender.names)
    block = sender.snapshot(learner)
    assert block.dtype == np.uint8
    assert block.shape == (sender.num_bytes,)
    parameters = list(runner.parameters())
    receiver.load(runner, block)
    assert all(p is q for p, q in zip(parameters, runner.parameters(), strict=True))
    for module_id in runner:
        for name, tensor in runner[module_id].state_dict().items():
            assert torch.equal(tensor, learner[module_id].state_dict()[name]), name


def wide(module_class: Any = None) -> Any:
    spec = RLModuleSpec(module_class, OBS, gym.spaces.Discrete(2), model_config={"fcnet_hiddens": [520, 520]})
    return MultiRLModuleSpec({"default_policy": spec}).build(seed=0)


class Subclass(DefaultActorCriticModule):
    """What it holds is not known."""


@pytest.mark.parametrize("module_class", [None, Subclass])
def test_large_weights_of_a_default_module_may_be_the_block_itself(module_class: Any) -> None:
    source, runner, copying = wide(module_class), wide(module_class), wide(module_class)
    layout = WeightsLayout.of(source)
    chain = acting_chain(runner["default_policy"])
    for _ in range(3):
        randomize(source)
        block = np.zeros(layout.num_bytes + 64, np.uint8)
        start = -block.ctypes.data % 64
        block = layout.snapshot(source, block[start : start + layout.num_bytes])
        layout.load(runner, block, may_keep=True)
        layout.load(copying, block)
        parameters = list(runner["default_policy"].inference_state_dict().values())
        kept = [np.shares_memory(parameter.detach().numpy(), block) for parameter in parameters]
        assert all(kept) if module_class is None else not any(kept)
        assert not any(
            np.shares_memory(parameter.detach().numpy(), block)
            for parameter in copying["default_policy"].parameters()
        )
        observations = torch.randn(5, 3)
        with torch.inference_mode():
            outputs = [
                module["default_policy"].forward_inference({"obs": observations})["action_dist_inputs"]
                for module in (source, runner, copying)
            ]
            assert torch.equal(outputs[0], outputs[1])
            assert torch.equal(outputs[0], outputs[2])
            if chain is not None:
                assert torch.equal(outputs[0], chain(observations, None)[0])
    randomize(source)
    layout.load(runner, bytes(layout.snapshot(source)), may_keep=True)  # read-only memory is copied
    assert layout.snapshot(runner).tobytes() == layout.snapshot(source).tobytes()


def test_weights_are_copied_between_modules_of_one_process() -> None:
    learner, runner = specs().build(seed=0), specs(inference_only=True).build(seed=1)
    layout = WeightsLayout.of(runner)
    for _ in range(2):
        randomize(learner)
        layout.copy(learner, runner)
        assert np.array_equal(layout.snapshot(runner), layout.snapshot(learner))
    runner["z"].encoder = specs(inference_only=True).build(seed=2)["z"].encoder  # the same layout
    layout.copy(learner, runner)
    assert np.array_equal(layout.snapshot(runner), layout.snapshot(learner))
    learner.remove_module("z")
    with pytest.raises(ValueError, match="make a new WeightsLayout"):
        layout.copy(learner, runner)


@pytest.mark.parametrize("kind", ["bytes", "read-only", "unaligned", "inference-mode"])
def test_any_buffer_is_taken(kind: str) -> None:
    module, twin = specs().build(seed=0), specs().build(seed=1)
    layout = WeightsLayout.of(module)
    block = layout.snapshot(module)
    buffer: Any = block
    if kind == "bytes":
        buffer = block.tobytes()
    elif kind == "read-only":
        buffer = block.copy()
        buffer.flags.writeable = False
    elif kind == "unaligned":
        buffer = np.frombuffer(b"x" + block.tobytes(), np.uint8)[1:]
    with torch.inference_mode(kind == "inference-mode"):
        layout.load(twin, buffer)
    assert np.array_equal(layout.snapshot(twin), block)


def test_a_snapshot_is_a_copy_and_can_reuse_memory() -> None:
    module = specs().build(seed=0)
    layout = WeightsLayout.of(module)
    out = np.full(layout.num_bytes, 255, np.uint8)
    first = layout.snapshot(module)
    assert layout.snapshot(module, out) is out
    odd = np.zeros(layout.num_bytes + 1, np.uint8)[1:]  # e.g. behind the header of a frame
    assert np.array_equal(layout.snapshot(module, odd), first)
    tail = slice(0, 4)
    randomize(module)
    assert np.array_equal(first[tail], out[tail])
    assert not np.array_equal(layout.snapshot(module), first)
    for wrong in (np.zeros(3, np.uint8), np.zeros(layout.num_bytes, np.int8)):
        with pytest.raises(ValueError, match="expected out to be uint8"):
            layout.snapshot(module, wrong)


def test_a_block_that_does_not_fit_is_refused() -> None:
    module = specs().build(seed=0)
    layout = WeightsLayout.of(module)
    before = layout.snapshot(module)
    with pytest.raises(ValueError, match=f"10 bytes do not fit.*{layout.num_bytes} bytes"):
        layout.load(module, bytes(10))
    module.remove_module("z")
    with pytest.raises(ValueError, match=r"differ from the layout \w+ in 'z/encoder"):
        layout.load(module, before)
    with pytest.raises(ValueError, match="make a new WeightsLayout"):
        layout.snapshot(module)


def test_the_digest_tells_architectures_apart() -> None:
    one, other = specs().build(), specs()
    other["z"].model_config = {"fcnet_hiddens": [6]}
    assert WeightsLayout.of(one).digest != WeightsLayout.of(other.build()).digest
    assert WeightsLayout.of(one).digest != WeightsLayout.of(one, inference_only=False).digest
    assert any("z/vf." in name for name in WeightsLayout.of(one, inference_only=False).names)
