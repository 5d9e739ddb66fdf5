"""MultiRLModule: routing of batches, adding and removing, state by path, torch's own methods."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlzmq.modules.multi_rl_module import MultiRLModule
from rlzmq.modules.multi_rl_module_spec import MultiRLModuleSpec
from rlzmq.modules.rl_module import TorchRLModule
from rlzmq.modules.spec import RLModuleSpec

OBS = gym.spaces.Box(-1.0, 1.0, (4,))


def spec(num_actions: int = 2, **kwargs: Any) -> RLModuleSpec:
    config = {"fcnet_hiddens": [8], "lstm_cell_size": 3, **kwargs.pop("model_config", {})}
    return RLModuleSpec(
        observation_space=OBS, action_space=gym.spaces.Discrete(num_actions), model_config=config, **kwargs
    )


def multi(**kwargs: Any) -> Any:
    return MultiRLModuleSpec({"a": spec(2), "b": spec(3)}, **kwargs).build(seed=0)


def test_each_module_gets_its_part_of_the_batch_and_unknown_ids_are_left_out() -> None:
    module = multi()
    batch = {mid: {"obs": torch.randn(n, 4)} for mid, n in (("b", 5), ("nobody", 2), ("a", 1))}
    for forward in (module.forward_inference, module.forward_exploration, module.forward_train):
        out = forward(batch)
        assert list(out) == ["b", "a"]
        assert out["a"]["action_dist_inputs"].shape == (1, 2)
        assert out["b"]["action_dist_inputs"].shape == (5, 3)
    assert module.forward_train({}) == {}


def test_modules_come_and_go_at_any_time() -> None:
    module = multi()
    extra = spec(model_config={"use_lstm": True}).build()
    assert not module.is_stateful()
    module.add_module("c", extra)
    assert module.is_stateful()
    assert extra.module_id == "c"
    assert module["c"] is extra
    assert module.get_initial_state()["a"] == {}
    assert sorted(module.get_initial_state()["c"]) == ["c", "h"]
    assert MultiRLModuleSpec.from_module(module)["c"].model_config == extra.model_config
    with pytest.raises(ValueError, match="module 'c' already; use override=True"):
        module.add_module("c", spec().build())
    module.add_module("c", spec().build(), override=True)
    assert not module.is_stateful()
    module.remove_module("c")
    assert list(module) == ["a", "b"]
    with pytest.raises(KeyError, match="no module 'c'"):
        module.remove_module("c")
    module.remove_module("c", raise_err_if_not_found=False)


def test_it_reads_like_a_dict() -> None:
    module = multi()
    assert list(module.keys()) == ["a", "b"]
    assert [m.module_id for m in module.values()] == ["a", "b"]
    assert ("a" in module, "z" in module, len(module)) == (True, False, 2)
    assert module.get("z") is None
    with pytest.raises(KeyError, match="no module 'bb'"):
        module["bb"]
    assert module.foreach_module(lambda mid, m, x: (mid, x), x=1) == [("a", 1), ("b", 1)]
    assert module.foreach_module(lambda mid, m: m.inference_only, return_dict=True) == {
        "a": False,
        "b": False,
    }


def test_state_by_component_path() -> None:
    module = multi()
    state = module.get_state()
    assert list(state) == ["a", "b"]
    assert list(module.get_state("b")) == ["b"]
    assert list(module.get_state(["a/pi"])["a"]) == ["pi.layers.0.weight", "pi.layers.0.bias"]
    assert list(module.get_state(["a/pi", "a"])["a"]) == list(state["a"])
    assert list(module.get_state(not_components="a")) == ["b"]
    module["b"].learner_only = True
    assert list(module.get_state(inference_only=True)) == ["a"]
    without = module.get_state(not_components=["a/vf"])
    assert list(without) == ["a", "b"]
    assert not any(name.startswith("vf") for name in without["a"])
    twin = MultiRLModuleSpec({"a": spec(2), "b": spec(3)}).build(seed=9)
    twin.set_state({**state, "unknown": {}})
    np.testing.assert_equal(twin.get_state(), state)
    other = MultiRLModuleSpec({"a": spec(2), "b": spec(3)}).build(seed=1)
    other.set_state(module.get_state("a/pi"))
    np.testing.assert_equal(other.get_state("a/pi"), module.get_state("a/pi"))


def test_torchs_methods_reach_all_modules() -> None:
    module = multi()
    num = sum(p.numel() for p in module["a"].parameters()) + sum(p.numel() for p in module["b"].parameters())
    assert sum(p.numel() for p in module.parameters()) == num
    assert next(iter(module.named_parameters()))[0] == "a/encoder.layers.0.weight"
    module.eval()
    assert not module["a"].training
    module.train()
    assert module["b"].training
    assert module.to(torch.float64)["a"].pi.layers[0].weight.dtype == torch.float64
    shared = MultiRLModule()
    shared.add_module("x", module["a"])
    shared.add_module("y", module["a"])
    assert len(list(shared.parameters())) == len(list(module["a"].parameters()))


class Embeds(TorchRLModule):
    def setup(self) -> None:
        self.net = torch.nn.Linear(4, 8)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"embeddings": self.net(batch["obs"])}


class Head(TorchRLModule):
    def setup(self) -> None:
        self.net = torch.nn.Linear(8, 2)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"action_dist_inputs": self.net(batch["embeddings"])}


class SharedEncoder(MultiRLModule):
    """Two heads on one encoder, in RLlib's form."""

    def setup(self) -> None:
        super().setup()
        self.encoder = self._rl_modules["encoder"]

    def _forward(self, batch: dict[str, Any], forward_type: str = "", **kwargs: Any) -> dict[str, Any]:
        return {
            module_id: self._rl_modules[module_id]._forward({**own, **self.encoder._forward(own)})
            for module_id, own in batch.items()
        }

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self._forward(batch, "_forward_train", **kwargs)

    _forward_inference = _forward_exploration = _forward_train


def test_a_class_of_ones_own_may_share_an_encoder() -> None:
    modules = {"encoder": spec(module_class=Embeds), **dict.fromkeys("ab", spec(module_class=Head))}
    module = MultiRLModuleSpec(modules, multi_rl_module_class=SharedEncoder).build()
    for forward in (module.forward_train, module.forward_inference):
        outputs = forward({"a": {"obs": torch.zeros(3, 4)}, "b": {"obs": torch.zeros(2, 4)}})
        assert outputs["b"]["action_dist_inputs"].shape == (2, 2)
