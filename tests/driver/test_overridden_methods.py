"""Every method that RLlib calls on users' classes is called here too, or a class that overrides it is told."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlzmq import (
    PPO,
    ConnectorV2,
    DefaultPPOTorchRLModule,
    MultiAgentEnvRunner,
    PPOLearner,
    RLModuleSpec,
    SingleAgentEnvRunner,
)
from tests.support.runs import small, two_agents

# What RLlib 2.60 calls, by the base class.
METHODS: dict[type, str] = {
    SingleAgentEnvRunner: "sample get_metrics get_spaces make_env make_module stop get_state set_state "
    "assert_healthy ping apply get_weights set_weights get_checkpointable_components get_metadata "
    "get_ctor_args_and_kwargs",
    PPOLearner: "build configure_optimizers configure_optimizers_for_module update compute_losses "
    "compute_loss_for_module "
    "compute_gradients postprocess_gradients postprocess_gradients_for_module apply_gradients "
    "before_gradient_based_update after_gradient_based_update should_module_be_updated get_parameters get_state "
    "set_state rl_module_required_apis register_optimizer filter_param_dict_for_optimizer get_optimizer "
    "get_optimizers_for_module get_param_ref rl_module_is_compatible apply shutdown "
    "get_checkpointable_components get_metadata get_ctor_args_and_kwargs",
    DefaultPPOTorchRLModule: "setup forward_inference forward_exploration forward_train _forward _forward_train "
    "get_initial_state is_stateful get_inference_action_dist_cls get_exploration_action_dist_cls "
    "get_train_action_dist_cls get_state set_state compute_values get_non_inference_attributes "
    "as_multi_rl_module compile get_metadata get_ctor_args_and_kwargs",
    ConnectorV2: "__call__ recompute_output_observation_space recompute_output_action_space get_state set_state "
    "merge_states reset_state",
    PPO: "setup training_step log_result stop step evaluate evaluate_offline cleanup restore_env_runners get_state "
    "set_state save_checkpoint load_checkpoint reset_config validate_env get_default_policy_class "
    "get_checkpointable_components get_metadata get_ctor_args_and_kwargs",
}


def overriding(
    base: type, names: str, calls: Counter[tuple[type, str]], more: dict[str, Any] | None = None
) -> Any:
    """Return a subclass that counts the calls of the methods, with their behaviour."""

    def counted(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls[base, name] += 1
            if more and name in more:
                return more[name](self, *args, **kwargs)
            return getattr(super(made, self), name)(*args, **kwargs)

        return method

    methods: dict[str, Any] = {name: counted(name) for name in names.split()}
    if base is PPOLearner:
        methods["rl_module_required_apis"] = classmethod(methods["rl_module_required_apis"])
    made: Any = type(f"My{base.__name__}", (base,), methods)
    return made


@pytest.mark.parametrize("has_agents", [False, True])
def test_every_method_is_called_or_its_class_is_told(
    has_agents: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner: type = MultiAgentEnvRunner if has_agents else SingleAgentEnvRunner
    methods = {base: names for base, names in METHODS.items() if base is not SingleAgentEnvRunner}
    methods[runner] = METHODS[SingleAgentEnvRunner]
    if has_agents:
        methods[PPOLearner] += " add_module remove_module"
    calls: Counter[tuple[type, str]] = Counter()
    piece = {
        "__call__": lambda self, *, batch, **kwargs: batch,
        "get_state": lambda self, *args, **kwargs: {"seen": 1},
    }
    with caplog.at_level(logging.WARNING, "rlzmq"):
        mine = {
            base: overriding(base, names, calls, piece if base is ConnectorV2 else None)
            for base, names in methods.items()
        }
    config = (two_agents if has_agents else small)(
        env_runner_cls=mine[runner],
        env_to_module_connector=lambda *args: mine[ConnectorV2](),
        learner_class=mine[PPOLearner],
        rl_module_spec=RLModuleSpec(module_class=mine[DefaultPPOTorchRLModule]),
        evaluation_interval=1,
        evaluation_duration=1,
        evaluation_config={"explore": False},
    )
    config.algo_class = mine[PPO]
    with config.build() as algo:
        algo.train()
        if has_agents:
            algo.add_module("another", RLModuleSpec(module_class=mine[DefaultPPOTorchRLModule]))
            algo.remove_module("another")
        algo.restore_from_path(algo.save_to_path(tmp_path / "saved"))
        algo.train()
    told = " ".join(record.getMessage() for record in caplog.records)
    silent = [
        f"{base.__name__}.{name}"
        for base, names in methods.items()
        for name in names.split()
        if not calls[base, name] and f"My{base.__name__}.{name}: no run calls" not in told
    ]
    assert silent == []


class Counts(ConnectorV2):
    """Keeps a state as RLlib's pieces do, without deltas."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num = 0

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        self.num += 1
        return batch

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"num": self.num}

    def set_state(self, state: dict[str, Any]) -> None:
        self.num = state["num"]

    def merge_states(self, states: Any) -> dict[str, Any]:
        return {"num": max(state["num"] for state in states)}


@pytest.mark.parametrize("num_env_runners", [0, 2])
def test_the_state_of_a_piece_of_users_is_merged_kept_and_saved(num_env_runners: int, tmp_path: Path) -> None:
    config = small(num_env_runners=num_env_runners, env_to_module_connector=lambda *args: Counts())
    with config.build() as algo:
        for _ in range(3):
            algo.train()
        path = algo.save_to_path(tmp_path / "saved")
        saved = algo.get_state("env_runner")["env_runner"]["env_to_module_connector"]["Counts"]["num"]
    assert saved >= 3 * 64 // 2 // max(num_env_runners, 1)
    with config.build() as algo:
        algo.restore_from_path(path)
        assert algo.env_to_module_connector.connectors[0].num == saved
