"""Modules on disk: round trips without pickle, classes by name or given, torn files refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlzmq.core.errors import CheckpointError
from rlzmq.modules.default_models.actor_critic import DefaultActorCriticModule
from rlzmq.modules.multi_rl_module_spec import MultiRLModuleSpec
from rlzmq.modules.rl_module import RLModule, TorchRLModule
from rlzmq.modules.spec import RLModuleSpec

SPACES = {"observation_space": gym.spaces.Box(-1.0, 1.0, (3,)), "action_space": gym.spaces.Discrete(2)}


class Custom(TorchRLModule):
    def setup(self) -> None:
        self.net = torch.nn.Linear(3, self.model_config["width"])


def spec(**kwargs: Any) -> RLModuleSpec:
    return RLModuleSpec(**{**SPACES, "model_config": {"fcnet_hiddens": [4]}, **kwargs})


def same(one: Any, other: Any) -> bool:
    np.testing.assert_equal(one.get_state(), other.get_state())
    return True


def test_a_module_comes_back_from_its_checkpoint(tmp_path: Path) -> None:
    module = spec(inference_only=True).build()
    path = module.save_to_path(tmp_path / "m")
    assert not [file for file in path.rglob("*") if "pkl" in file.suffix or "pickle" in file.suffix]
    back = RLModule.from_checkpoint(path)
    assert type(back) is DefaultActorCriticModule
    assert same(back, module)
    assert back.inference_only
    assert back.observation_space == module.observation_space
    assert same(DefaultActorCriticModule.from_checkpoint(path), module)
    other = spec(inference_only=True).build()
    other.restore_from_path(path)
    assert same(other, module)


def test_the_class_is_named_or_given(tmp_path: Path) -> None:
    class Local(Custom):
        pass

    path = spec(module_class=Custom, model_config={"width": 5}).build().save_to_path(tmp_path / "named")
    assert type(TorchRLModule.from_checkpoint(path)) is Custom
    local = spec(module_class=Local, model_config={"width": 5}).build()
    path = local.save_to_path(tmp_path / "local")
    with pytest.raises(CheckpointError, match=r"defined inside a function.*module_class="):
        RLModule.from_checkpoint(path)
    assert same(RLModule.from_checkpoint(path, module_class=Local), local)
    assert type(Local.from_checkpoint(path)) is Local


def test_several_modules_with_awkward_ids(tmp_path: Path) -> None:
    ids = ["a", "team/red", "..", "späte Nacht", "weights"]
    module = MultiRLModuleSpec({mid: spec() for mid in ids}).build()
    path = module.save_to_path(tmp_path / "m")
    assert all(tmp_path in file.resolve().parents for file in path.rglob("*"))
    back = RLModule.from_checkpoint(path)
    assert list(back) == ids
    assert same(back, module)
    for module_id in ("a", "team/red", "weights"):
        assert same(RLModule.from_checkpoint(path / module_id), module[module_id])
    with pytest.raises(CheckpointError, match=r"no module 'teams/red'.*team/red"):
        RLModule.from_checkpoint(path / "teams/red")


def test_load_state_path_restores_after_building(tmp_path: Path) -> None:
    one = spec().build()
    path = str(one.save_to_path(tmp_path / "one"))
    assert same(spec(load_state_path=path).build(), one)
    both = MultiRLModuleSpec({"a": spec(), "b": spec()}).build()
    path = str(both.save_to_path(tmp_path / "both"))
    partly = MultiRLModuleSpec({"a": spec(), "b": spec()}, load_state_path=path, modules_to_load=["b"])
    built = partly.build(seed=0)
    assert same(built["b"], both["b"])
    assert not np.array_equal(built["a"].get_state()["pi.layers.0.weight"], 0)
    loaded = spec(load_state_path=path).build(module_id="a")
    assert same(loaded, both["a"])
    with pytest.raises(CheckpointError, match=r"modules \['a', 'b'\]; the one to load is ambiguous"):
        spec(load_state_path=path).build(module_id="c")
    with pytest.raises(CheckpointError, match=r"none of \['c'\]"):
        MultiRLModuleSpec({"c": spec()}, load_state_path=path).build()


class Wider(Custom):
    def setup(self) -> None:
        super().setup()
        self.more = torch.nn.Linear(3, 3)


def test_a_checkpoint_that_lacks_weights_is_not_taken_for_whole(tmp_path: Path) -> None:
    path = spec(module_class=Custom, model_config={"width": 5}).build().save_to_path(tmp_path / "m")
    with pytest.raises(ValueError, match=r"missing .more"):
        spec(module_class=Wider, model_config={"width": 5}, load_state_path=path).build()
    with pytest.raises(ValueError, match=r"missing .more"):
        RLModule.from_checkpoint(path, module_class=Wider)
