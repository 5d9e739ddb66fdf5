"""Specs and configs of modules: names, plain forms, seeds, merging, missing spaces; modules on disk, without pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from rlzmq.config.model_config import DefaultModelConfig
from rlzmq.core.errors import CheckpointError, ConfigurationError
from rlzmq.modules.default_models.actor_critic import DefaultActorCriticModule
from rlzmq.modules.multi_rl_module import MultiRLModule
from rlzmq.modules.multi_rl_module_spec import MultiRLModuleSpec
from rlzmq.modules.rl_module import RLModule, TorchRLModule
from rlzmq.modules.spec import RLModuleSpec
from tests.learners.cases import LinearModule

OBS = gym.spaces.Box(-1.0, 1.0, (4,))
ACT = gym.spaces.Discrete(2)
SMALL = {"fcnet_hiddens": [8]}


def spec(**kwargs: Any) -> RLModuleSpec:
    return RLModuleSpec(**{"observation_space": OBS, "action_space": ACT, "model_config": SMALL, **kwargs})


class Custom(LinearModule):
    pass


# -- DefaultModelConfig -----------------------------------------------------------------------------


def test_unknown_model_settings_are_errors_with_the_closest_name() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'fcnet_hiddens'"):
        spec(model_config={"fcnet_hidden": [8]}).build()
    with pytest.raises(TypeError):
        DefaultModelConfig(fcnet_hidden=[8])  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "config",
    [
        {"fcnet_hiddens": 64},
        {"use_lstm": "false"},
        {"vf_share_layers": "no"},
    ],
)
def test_wrong_values_name_the_setting(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(config))):
        DefaultModelConfig.from_dict(config)


def test_a_model_config_survives_its_plain_form() -> None:
    config = DefaultModelConfig(conv_filters=[[8, 3, 1]], fcnet_kernel_initializer=nn.init.orthogonal_)
    plain = json.loads(json.dumps(config.to_dict()))
    assert plain["fcnet_kernel_initializer"] == "orthogonal_"
    back = DefaultModelConfig.from_dict(plain)
    assert back.conv_filters == [[8, 3, 1]]
    assert back.to_dict() == plain
    with pytest.raises(ConfigurationError, match="'lstm_bias_initializer'"):
        DefaultModelConfig(lstm_bias_initializer=lambda tensor: None).to_dict()


# -- RLModuleSpec ---------------------------------------------------------------------------------------


def test_a_seed_decides_the_weights_and_leaves_the_global_stream_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, second = spec().build(seed=1).get_state(), spec().build(seed=1).get_state()
    assert torch.equal(torch.random.get_rng_state(), before)
    np.testing.assert_equal(first, second)
    other = spec().build(seed=2).get_state()
    assert not np.array_equal(other["encoder.layers.0.weight"], first["encoder.layers.0.weight"])
    spec().build()
    assert not torch.equal(torch.random.get_rng_state(), before)


def test_modules_of_one_run_differ_and_do_not_depend_on_each_other() -> None:
    both = MultiRLModuleSpec({"a": spec(), "b": spec()}).build(seed=1)
    alone = MultiRLModuleSpec({"b": spec()}).build(seed=1)
    a, b = both["a"].get_state(), both["b"].get_state()
    assert not np.array_equal(a["encoder.layers.0.weight"], b["encoder.layers.0.weight"])
    np.testing.assert_equal(b, alone["b"].get_state())
    default = MultiRLModuleSpec({"default_policy": spec()}).build(seed=1)["default_policy"]
    np.testing.assert_equal(default.get_state(), spec().build(seed=1).get_state())


@pytest.mark.parametrize("module_class", [None, Custom])
def test_a_missing_space_names_the_module(module_class: Any) -> None:
    specs = MultiRLModuleSpec({"p0": spec(module_class=module_class), "p1": spec(module_class=module_class)})
    specs["p1"].action_space = None
    with pytest.raises(ConfigurationError, match=r"module 'p1' .*no action_space"):
        specs.build()
    specs["p1"].observation_space = None
    with pytest.raises(ConfigurationError, match="no action_space and no observation_space"):
        specs.build()


def test_an_error_in_setup_is_the_users_own_with_the_module_named() -> None:
    class Broken(TorchRLModule):
        def setup(self) -> None:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        spec(module_class=Broken).build(module_id="p7")
    assert caught.value.__notes__ == ["while building module 'p7' (Broken)"]


def test_update_fills_or_overrides_and_merges_model_configs() -> None:
    base = RLModuleSpec(module_class=Custom, model_config={"a": 1, "b": 1})
    base.update(RLModuleSpec(observation_space=OBS, learner_only=True, model_config={"b": 2}))
    assert (base.module_class, base.observation_space, base.learner_only) == (Custom, OBS, True)
    assert base.model_config == {"a": 1, "b": 2}
    base.update(
        RLModuleSpec(module_class=DefaultActorCriticModule, model_config={"b": 3, "c": 3}), override=False
    )
    assert base.module_class is Custom
    assert base.model_config == {"a": 1, "b": 2, "c": 3}
    base.update(RLModuleSpec(module_class=DefaultActorCriticModule))
    assert base.module_class is DefaultActorCriticModule
    assert base.model_config == {"a": 1, "b": 2, "c": 3}


def test_a_spec_survives_its_plain_form() -> None:
    original = spec(
        module_class=Custom,
        observation_space=gym.spaces.Dict({"x": OBS, "y": gym.spaces.MultiDiscrete([2, 3])}),
        inference_only=True,
        load_state_path="some/where",
    )
    with pytest.raises(ConfigurationError, match="Custom' is not trusted"):
        RLModuleSpec.from_dict(original.to_dict())
    assert RLModuleSpec.from_dict(original.to_dict(), trust=[__name__]) == original
    assert RLModuleSpec.from_dict(RLModuleSpec().to_dict()) == RLModuleSpec()
    described = spec(model_config=DefaultModelConfig(fcnet_hiddens=[3])).to_dict()
    assert described["model_config"]["fcnet_hiddens"] == [3]
    with pytest.raises(ConfigurationError, match="Did you mean 'module_class'"):
        RLModuleSpec.from_dict({"model_class": "a:b"})


def test_a_named_class_must_exist_and_be_a_module() -> None:
    class Local(Custom):
        pass

    local = spec(module_class=Local).to_dict()
    for name, text in [
        (local["module_class"], "defined inside a function"),
        ("json:JSONDecoder", "not a subclass of RLModule"),
        ("json:codecs.Codec", "not trusted"),
        ("json:Nothing", "cannot be found"),
    ]:
        with pytest.raises(ConfigurationError, match=text):
            RLModuleSpec.from_dict({**local, "module_class": name}, trust=[__name__, "json"])
    assert RLModuleSpec.from_dict(local, module_class=Local).module_class is Local


# -- MultiRLModuleSpec --------------------------------------------------------------------------------


class OuterClass(MultiRLModule):
    pass


def test_a_multi_spec_survives_its_plain_form() -> None:
    original = MultiRLModuleSpec(
        {"a": spec(module_class=Custom), "b": spec(learner_only=True)},
        multi_rl_module_class=OuterClass,
        model_config={"m": 1},
        modules_to_load=["a"],
    )
    back = MultiRLModuleSpec.from_dict(original.to_dict(), trust=[__name__])
    assert back.rl_module_specs == original.rl_module_specs
    assert back.to_dict() == original.to_dict()
    assert type(back.build()) is OuterClass


def test_multi_spec_editing() -> None:
    specs = MultiRLModuleSpec({"a": spec()})
    specs.add_modules({"b": spec()})
    assert "b" in specs
    with pytest.raises(ValueError, match="spec for module 'b' already"):
        specs.add_modules({"b": spec()}, override=False)
    specs.remove_modules("b")
    assert "b" not in specs
    with pytest.raises(KeyError, match="no spec for module 'aa'"):
        specs["aa"]
    specs.update(RLModuleSpec(module_class=Custom))
    assert specs["a"].module_class is Custom
    specs.update(MultiRLModuleSpec({"a": RLModuleSpec(learner_only=True), "c": spec()}))
    assert specs["a"].learner_only
    assert "c" in specs
    assert specs.as_multi_rl_module_spec() is specs


# -- modules on disk -----------------------------------------------------------------------------------


SPACES = {"observation_space": gym.spaces.Box(-1.0, 1.0, (3,)), "action_space": gym.spaces.Discrete(2)}


class Sized(TorchRLModule):
    def setup(self) -> None:
        self.net = torch.nn.Linear(3, self.model_config["width"])


def sized(**kwargs: Any) -> RLModuleSpec:
    return RLModuleSpec(**{**SPACES, "model_config": {"fcnet_hiddens": [4]}, **kwargs})


def same(one: Any, other: Any) -> bool:
    np.testing.assert_equal(one.get_state(), other.get_state())
    return True


def test_a_module_comes_back_from_its_checkpoint(tmp_path: Path) -> None:
    module = sized(inference_only=True).build()
    path = module.save_to_path(tmp_path / "m")
    assert not [file for file in path.rglob("*") if "pkl" in file.suffix or "pickle" in file.suffix]
    back = RLModule.from_checkpoint(path)
    assert type(back) is DefaultActorCriticModule
    assert same(back, module)
    assert back.inference_only
    assert back.observation_space == module.observation_space
    assert same(DefaultActorCriticModule.from_checkpoint(path), module)
    other = sized(inference_only=True).build()
    other.restore_from_path(path)
    assert same(other, module)


def test_the_class_is_named_or_given(tmp_path: Path) -> None:
    class Local(Sized):
        pass

    path = sized(module_class=Sized, model_config={"width": 5}).build().save_to_path(tmp_path / "named")
    assert type(TorchRLModule.from_checkpoint(path)) is Sized
    local = sized(module_class=Local, model_config={"width": 5}).build()
    path = local.save_to_path(tmp_path / "local")
    with pytest.raises(CheckpointError, match=r"defined inside a function.*module_class="):
        RLModule.from_checkpoint(path)
    assert same(RLModule.from_checkpoint(path, module_class=Local), local)
    assert type(Local.from_checkpoint(path)) is Local


def test_several_modules_with_awkward_ids(tmp_path: Path) -> None:
    ids = ["a", "team/red", "..", "späte Nacht", "weights"]
    module = MultiRLModuleSpec({mid: sized() for mid in ids}).build()
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
    one = sized().build()
    path = str(one.save_to_path(tmp_path / "one"))
    assert same(sized(load_state_path=path).build(), one)
    both = MultiRLModuleSpec({"a": sized(), "b": sized()}).build()
    path = str(both.save_to_path(tmp_path / "both"))
    partly = MultiRLModuleSpec({"a": sized(), "b": sized()}, load_state_path=path, modules_to_load=["b"])
    built = partly.build(seed=0)
    assert same(built["b"], both["b"])
    assert not np.array_equal(built["a"].get_state()["pi.layers.0.weight"], 0)
    loaded = sized(load_state_path=path).build(module_id="a")
    assert same(loaded, both["a"])
    with pytest.raises(CheckpointError, match=r"modules \['a', 'b'\]; .* ambiguous"):
        sized(load_state_path=path).build(module_id="c")
    with pytest.raises(CheckpointError, match=r"none of \['c'\]"):
        MultiRLModuleSpec({"c": sized()}, load_state_path=path).build()


class Wider(Sized):
    def setup(self) -> None:
        super().setup()
        self.more = torch.nn.Linear(3, 3)


def test_a_checkpoint_that_lacks_weights_is_not_taken_for_whole(tmp_path: Path) -> None:
    path = sized(module_class=Sized, model_config={"width": 5}).build().save_to_path(tmp_path / "m")
    with pytest.raises(ValueError, match=r"missing .more"):
        sized(module_class=Wider, model_config={"width": 5}, load_state_path=path).build()
    with pytest.raises(ValueError, match=r"missing .more"):
        RLModule.from_checkpoint(path, module_class=Wider)
