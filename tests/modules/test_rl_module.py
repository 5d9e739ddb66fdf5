"""RLModule: custom modules, modes and gradients around forward passes, checked outputs, state, mix-ins."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from rlzmq.core.errors import ConfigurationError
from rlzmq.episodes.columns import Columns
from rlzmq.modules.distributions import TorchCategorical
from rlzmq.modules.rl_module import (
    InferenceOnlyAPI,
    QNetAPI,
    SelfSupervisedLossAPI,
    TargetNetworkAPI,
    TorchRLModule,
    ValueFunctionAPI,
)
from rlzmq.modules.spec import RLModuleSpec
from rlzmq.modules.weights import WeightsLayout
from tests.support.losses import assert_close
from tests.support.runs import small

OBS = gym.spaces.Box(-1.0, 1.0, (4,))
ACT = gym.spaces.Discrete(2)


class TenLines(TorchRLModule):
    def setup(self) -> None:
        assert self.observation_space is not None
        self.net = nn.Sequential(
            nn.Linear(self.observation_space.shape[0], self.model_config["hidden"]),  # type: ignore[index]
            nn.Dropout(0.5),
            nn.Linear(self.model_config["hidden"], self.action_space.n),  # type: ignore[union-attr]
        )

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self.net(batch[Columns.OBS])}


class WithValues(TenLines, ValueFunctionAPI, InferenceOnlyAPI):
    def setup(self) -> None:
        super().setup()
        self.values = nn.Linear(4, 1)
        self.extra = nn.ModuleDict({"kept": nn.Linear(2, 2), "dropped": nn.Linear(2, 2)})

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> torch.Tensor:
        values: torch.Tensor = self.values(batch[Columns.OBS]).squeeze(-1)
        return values

    def get_non_inference_attributes(self) -> list[str]:
        return ["values", "extra.dropped", "not_made_yet.at_all"]


def ten_lines(**kwargs: Any) -> TenLines:
    return TenLines(OBS, ACT, model_config={"hidden": 8}, **kwargs)


def test_acting_is_in_eval_mode_without_gradients_and_restores_the_mode() -> None:
    module = ten_lines().train()
    batch = {Columns.OBS: torch.ones(3, 4)}
    first, second = (module.forward_exploration(batch)[Columns.ACTION_DIST_INPUTS] for _ in range(2))
    assert torch.equal(first, second)  # dropout was off
    assert not first.requires_grad
    assert module.training
    assert torch.is_grad_enabled()
    module.eval()
    assert not module.forward_inference(batch)[Columns.ACTION_DIST_INPUTS].requires_grad
    assert not module.training
    out = module.forward_train(batch)[Columns.ACTION_DIST_INPUTS]
    assert out.requires_grad
    assert module.training


class Returns(TorchRLModule):
    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        outputs: dict[str, Any] = self.model_config["outputs"]
        return outputs

    def get_initial_state(self) -> Any:
        return self.model_config.get("state", {})


def returning(outputs: Any, **config: Any) -> Returns:
    spec = RLModuleSpec(Returns, OBS, ACT, model_config={"outputs": outputs, **config})
    module: Returns = spec.build(module_id="policy_1")
    return module


def test_missing_outputs_are_errors_at_the_call() -> None:
    with pytest.raises(ValueError, match=r"module 'policy_1' .* got 'logits'"):
        returning({"logits": 1}).forward_exploration({})
    with pytest.raises(TypeError, match=r"module 'policy_1'.*got Tensor"):
        returning(torch.zeros(1)).forward_inference({})
    with pytest.raises(ValueError, match=r"module 'policy_1'.*'state_out', got 'actions'"):
        returning({"actions": 1}, state={"h": torch.zeros(2)}).forward_inference({})
    module = returning({"actions": 1})
    assert module.forward_inference({}) == {"actions": 1}
    with pytest.raises(ValueError, match=r"_forward_train .*'embeddings'"):
        module.require_output(module.forward_train({}), Columns.EMBEDDINGS)
    assert module.require_output({"x": 3}, "x") == 3


def test_a_module_without_action_space_may_return_what_it_likes() -> None:
    class Encoder(TorchRLModule):
        def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            return {Columns.EMBEDDINGS: batch[Columns.OBS]}

    assert Encoder(OBS).forward_inference({Columns.OBS: 1}) == {Columns.EMBEDDINGS: 1}


def test_inference_only_leaves_out_what_learners_need() -> None:
    full = WithValues(OBS, ACT, model_config={"hidden": 8})
    acting = WithValues(OBS, ACT, inference_only=True, model_config={"hidden": 8})
    assert not hasattr(acting, "values")
    assert list(acting.extra) == ["kept"]
    assert sorted(full.get_state(inference_only=True)) == sorted(acting.get_state())
    acting.set_state(full.get_state())
    acting.set_state(full.get_state(inference_only=True))
    batch = {Columns.OBS: torch.ones(2, 4)}
    assert_close(acting.forward_inference(batch), full.forward_inference(batch))
    with pytest.raises(RuntimeError, match="inference_only=True and cannot train"):
        acting.forward_train(batch)
    full.set_state(acting.get_state())  # a learner may start from an acting copy
    with pytest.raises(ValueError, match="both inference_only and learner_only"):
        WithValues(OBS, ACT, inference_only=True, learner_only=True, model_config={"hidden": 8})


def test_state_is_a_dict_of_numpy_copies() -> None:
    module = ten_lines()
    state = module.get_state()
    assert all(isinstance(value, np.ndarray) for value in state.values())
    state["net.0.bias"][:] = 7.0
    assert not np.any(module.get_state()["net.0.bias"] == 7.0)
    module.set_state(state)
    assert np.all(module.get_state()["net.0.bias"] == 7.0)
    assert set(module.get_state("net.0")) == {"net.0.weight", "net.0.bias"}
    assert set(module.get_state(not_components=["net.0", "net.2.bias"])) == {"net.2.weight"}


def test_a_state_that_does_not_fit_is_refused_and_nothing_is_loaded() -> None:
    module = ten_lines()
    before = module.get_state()
    changed = {name: value + 1 for name, value in before.items()}
    missing = {name: value for name, value in changed.items() if name != "net.2.bias"}
    with pytest.raises(ValueError, match=r"missing 'net.2.bias', unknown none"):
        module.set_state(missing, strict=True)
    with pytest.raises(ValueError, match=r"missing none, unknown 'net.9'"):
        module.set_state({**changed, "net.9": np.zeros(1)})
    with pytest.raises(ValueError, match=r"'net.2.bias' expects shape \(2,\), got \(3,\)"):
        module.set_state({**changed, "net.2.bias": np.zeros(3)})
    np.testing.assert_equal(module.get_state(), before)
    module.set_state(missing, strict=False)
    assert np.array_equal(module.get_state()["net.0.bias"], changed["net.0.bias"])


def test_a_partial_state_changes_what_it_names_unless_the_module_only_acts() -> None:
    module = ten_lines()
    before = module.get_state()
    module.set_state({name: value + 1 for name, value in module.get_state("net.2").items()})
    after = module.get_state()
    assert all(np.array_equal(after[name], before[name] + ("net.2" in name)) for name in before)
    acting = ten_lines(inference_only=True)
    with pytest.raises(ValueError, match=r"missing 'net.0.weight', 'net.0.bias'"):
        acting.set_state(module.get_state("net.2"))


def test_half_precision_weights_are_given_as_floats_without_loss() -> None:
    module = ten_lines().to(torch.bfloat16)
    state = module.get_state()
    assert {value.dtype for value in state.values()} == {np.dtype(np.float32)}
    twin = ten_lines().to(torch.bfloat16)
    twin.set_state(state)
    np.testing.assert_equal(twin.get_state(), state)


# -- mix-ins -------------------------------------------------------------------------------------------


class QModule(TorchRLModule, QNetAPI, TargetNetworkAPI, InferenceOnlyAPI):
    def setup(self) -> None:
        self.q = nn.Linear(4, 2)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"actions": self.q(batch["obs"]).argmax(-1)}

    def compute_q_values(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {"qf_preds": self.q(batch["obs"])}

    def make_target_networks(self) -> None:
        self.target_q = copy.deepcopy(self.q)

    def get_target_network_pairs(self) -> list[tuple[Any, Any]]:
        return [(self.q, self.target_q)]

    def forward_target(self, batch: dict[str, Any], **kwargs: Any) -> Any:
        return self.target_q(batch["obs"])

    def get_non_inference_attributes(self) -> list[str]:
        return ["target_q"]


def test_target_networks_are_made_later_and_never_sent_to_runners() -> None:
    learner, runner = (RLModuleSpec(QModule, OBS, ACT, inference_only=only).build() for only in (False, True))
    before = WeightsLayout.of(learner).digest
    learner.make_target_networks()
    assert WeightsLayout.of(learner).digest == before == WeightsLayout.of(runner).digest
    assert "target_q.weight" in learner.get_state()
    assert list(learner.get_state(inference_only=True)) == list(runner.get_state())
    runner.set_state(learner.get_state())
    batch = {"obs": torch.randn(4, 4)}
    assert torch.equal(learner.forward_target(batch), learner.compute_q_values(batch)["qf_preds"])
    assert runner.forward_inference(batch)["actions"].shape == (4,)
    with pytest.raises(NotImplementedError, match="QModule has no advantage stream"):
        learner.compute_advantage_distribution(batch)


@pytest.mark.parametrize(
    "api", [InferenceOnlyAPI, QNetAPI, SelfSupervisedLossAPI, TargetNetworkAPI, ValueFunctionAPI]
)
def test_a_promise_that_is_not_kept_is_an_error_when_building(api: type[Any]) -> None:
    broken = type("Broken", (TorchRLModule, api), {})
    with pytest.raises(TypeError, match="abstract"):
        RLModuleSpec(broken, OBS, ACT).build(module_id="p0")


# -- outputs are tried at build ------------------------------------------------------------------------


BOX = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
DISCRETE = gym.spaces.Discrete(2)
DIST = Columns.ACTION_DIST_INPUTS


class Odd(TorchRLModule, ValueFunctionAPI):
    """Outputs and values as its subclasses say."""

    num_forwards = 0

    def setup(self) -> None:
        self.pi = torch.nn.Linear(4, 5)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> Any:
        self.num_forwards += 1
        return self.outputs(batch[Columns.OBS], batch)

    def outputs(self, obs: torch.Tensor, batch: dict[str, Any]) -> Any:
        return {DIST: self.pi(obs)[..., :2]}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Any:
        return batch[Columns.OBS].sum(-1)


class TooWide(Odd):
    def outputs(self, obs: Any, batch: Any) -> Any:
        return {DIST: self.pi(obs)}


class Memory(Odd):
    def get_initial_state(self) -> Any:
        return {"h": torch.zeros(6)}

    def outputs(self, obs: Any, batch: Any) -> Any:
        return {**super().outputs(obs, batch), "state_out": {"h": torch.zeros(obs.shape[0], 7)}}


class TrailingOne(Odd):
    def compute_values(self, batch: Any, embeddings: Any = None) -> Any:
        return batch[Columns.OBS].sum(-1, keepdim=True)


class WideInTraining(Odd):
    def _forward_train(self, batch: Any, **kwargs: Any) -> Any:
        return {DIST: self.pi(batch[Columns.OBS])}


def config_with(module_class: type, action_space: gym.Space[Any] = DISCRETE) -> Any:
    env_config = {"observation_space": BOX, "action_space": action_space}
    spec = RLModuleSpec(module_class=module_class, model_config={"hidden": 8})
    return small(env="rlzmq.envs.examples:RandomEnv", env_config=env_config, rl_module_spec=spec)


SAMPLES = "'action_dist_inputs' out of _forward_exploration"
NEEDS = "as TorchCategorical of action_space Discrete(2) has 2 inputs per row."


@pytest.mark.parametrize(
    ("module_class", "text"),
    [
        (TooWide, f"{SAMPLES} has the shape (3, 5) for 3 observations; expected (3, 2), {NEEDS}"),
        (Memory, "expected those of get_initial_state() with 3 rows, {'h': (3, 6)}."),
        (
            TrailingOne,
            "compute_values() returned the shape (3, 1) for 3 observations; expected (3,): one value each.",
        ),
        (WideInTraining, "out of _forward_train has the shape (3, 5) for 3 observations; expected (3, 2)"),
    ],
)
def test_an_output_that_does_not_fit_is_named_with_both_shapes_at_build(
    module_class: type, text: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        config_with(module_class).build()
    assert text in str(caught.value)
    assert f"module 'default_policy' ({module_class.__name__}): " in str(caught.value)


class OwnCategorical(TorchCategorical):
    """Two logits out of five inputs."""

    @classmethod
    def from_logits(cls, logits: Any) -> Any:
        return super().from_logits(logits[..., :2])

    @staticmethod
    def required_input_dim(space: Any, model_config: Any = None) -> int:
        raise NotImplementedError


class OwnDistribution(TooWide):
    action_dist_cls = OwnCategorical


class Reads(Odd):
    """Reads a column that is not there yet."""

    def outputs(self, obs: Any, batch: Any) -> Any:
        return {DIST: self.pi(obs)[..., :2] + batch["made_by_a_connector"]}


@pytest.mark.parametrize("module_class", [Odd, OwnDistribution, Reads])
def test_a_module_that_fits_or_cannot_be_tried_is_built_and_left_alone(module_class: type) -> None:
    before = torch.random.get_rng_state()
    with config_with(module_class).build() as algo:
        assert algo.get_module().num_forwards == 0
    assert torch.equal(torch.random.get_rng_state(), before)


class TakesNoTime(WithValues):
    def _forward(self, batch: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        raise NotImplementedError


class TakesThreeArguments(WithValues):
    def __init__(self, observation_space: Any, action_space: Any, model_config: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("module_class", "name"), [(TakesNoTime, "_forward"), (TakesThreeArguments, "__init__")]
)
def test_a_signature_without_what_is_passed_is_refused_at_build(module_class: type, name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{module_class.__name__}\.{name}: expected a function of"):
        small(rl_module_spec=RLModuleSpec(module_class=module_class, model_config={"hidden": 8})).build()


class Detached(WithValues):
    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {name: value.detach() for name, value in self._forward(batch).items()}


@pytest.mark.parametrize("module_class", [Detached, WithValues])
def test_a_policy_that_cannot_be_trained_is_told(
    module_class: type, caplog: pytest.LogCaptureFixture
) -> None:
    with small(rl_module_spec=RLModuleSpec(module_class=module_class, model_config={"hidden": 8})).build():
        assert ("depends on no trainable parameter" in caplog.text) is (module_class is Detached)
