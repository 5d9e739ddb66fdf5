"""Networks in bfloat16 and everything else in float32, with every algorithm's learner; compiled modules and steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlzmq import (
    APPOConfig,
    Columns,
    ConfigurationError,
    IMPALAConfig,
    PPOConfig,
    TorchRLModule,
    ValueFunctionAPI,
)
from rlzmq.core.tree import tree_leaves
from rlzmq.learners.execution import Execution
from tests.learners.all_algorithms import ALGORITHMS, config_of, record_pendulum, trained, weights_of
from tests.learners.cases import episode_batch, linear_spec, ppo_config
from tests.support.runs import small

# Networks that take other ways than dense layers: atoms, noise, memory.
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{algorithm: (algorithm, {}, {}) for algorithm in ALGORITHMS},
    "dqn with atoms and noise": ("dqn", {"num_atoms": 11, "noisy": True}, {}),
    "dqn with memory": (
        "dqn",
        {"replay_buffer_config": {"type": "EpisodeReplayBuffer", "capacity": 1000}, "burn_in_len": 2},
        {"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 4},
    ),
    "appo with memory": ("appo", {}, {"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 4}),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_pendulum(tmp_path_factory.mktemp("data"))


class Notes:
    """Mix-in: keeps what the first minibatch's losses get, the losses, and the gradients."""

    def compute_losses(self: Any, *, fwd_out: Any, batch: Any) -> Any:
        losses = super().compute_losses(fwd_out=fwd_out, batch=batch)  # type: ignore[misc]
        if not hasattr(self, "noted"):
            self.noted = {
                "outputs": {leaf.dtype for leaf in tree_leaves(fwd_out) if leaf.is_floating_point()},
                "losses": {module_id: loss.detach() for module_id, loss in losses.items()},
            }
        return losses

    def apply_gradients(self: Any, gradients_dict: dict[Tensor, Tensor]) -> None:
        self.noted.setdefault("gradients", [g.clone() for g in gradients_dict.values()])
        super().apply_gradients(gradients_dict)  # type: ignore[misc]


@pytest.fixture
def results_of_layers(monkeypatch: Any) -> Iterator[set[torch.dtype]]:
    """Types of the results of dense layers."""
    dtypes: set[torch.dtype] = set()
    linear = nn.functional.linear

    def noting(*args: Any) -> Tensor:
        result = linear(*args)
        dtypes.add(result.dtype)
        return result

    monkeypatch.setattr(nn.functional, "linear", noting)
    return dtypes


@pytest.mark.parametrize("variant", VARIANTS)
def test_networks_run_in_bfloat16_and_losses_in_float32(
    variant: str, data: Path, results_of_layers: set[torch.dtype]
) -> None:
    algorithm, training, model = VARIANTS[variant]

    def made() -> Any:
        config = config_of(algorithm, data, Notes, **training)
        return config.rl_module(model_config={"fcnet_hiddens": [8], **model})

    exact, before, _ = trained(made())
    assert results_of_layers == {torch.float32}
    mixed, _, result = trained(made().framework(torch_amp_dtype="bfloat16"))
    assert torch.bfloat16 in results_of_layers

    assert mixed.noted["outputs"] == {torch.float32}
    # The same data and weights: numbers differ by the rounding to 8 bits of each layer's inputs, weights and outputs.
    loss, exact_loss = (learner.noted["losses"]["default_policy"] for learner in (mixed, exact))
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(exact_loss), rel=0.02, abs=0.02)
    gradients, exact_gradients = (
        torch.cat([g.flatten() for g in learner.noted["gradients"]]) for learner in (mixed, exact)
    )
    assert gradients.dtype == torch.float32
    assert float((gradients - exact_gradients).norm()) <= 0.1 * float(exact_gradients.norm())

    assert result["num_nonfinite_gradients_skipped"] == 0
    assert all(np.isfinite(value) for value in result.values())
    after = weights_of(mixed)
    assert {weights.dtype for weights in after.values() if weights.is_floating_point()} == {torch.float32}
    assert any(not torch.equal(after[name], before[name]) for name in before)
    for _, optimizer in mixed.get_optimizers_for_module("default_policy"):
        for state in optimizer.state.values():
            assert {leaf.dtype for leaf in state.values() if isinstance(leaf, Tensor)} <= {torch.float32}


class Custom(TorchRLModule, ValueFunctionAPI):
    """Returns what its layers return; its values reuse features that were first computed without gradients."""

    def setup(self) -> None:
        self.body, self.pi, self.vf = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 1)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self.pi(self.body(batch[Columns.OBS]))}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Tensor:
        with torch.no_grad():
            self.body(batch[Columns.OBS])
        self.layer_dtype = (values := self.vf(self.body(batch[Columns.OBS]))).dtype
        return values.squeeze(-1)


def test_losses_get_float32_from_custom_modules(monkeypatch: Any) -> None:
    config = ppo_config(minibatch_size=None, num_epochs=1, vf_clip_param=None)
    config.framework(torch_amp_dtype="bfloat16")
    learner = config.learner_class(config=config, module_spec=linear_spec(Custom))
    learner.build()
    module = learner.module["default_policy"]
    given: list[torch.dtype] = []
    compute_loss = learner.compute_loss_for_module

    def noting(*, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Any:
        given.extend((fwd_out[Columns.ACTION_DIST_INPUTS].dtype, module.compute_values(batch).dtype))
        return compute_loss(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)

    monkeypatch.setattr(learner, "compute_loss_for_module", noting)
    module.pi.weight.data.zero_()  # gradients reach the body through the values only
    before = module.body.weight.detach().clone()
    learner.update(episodes=episode_batch(40, 24))
    assert given == [torch.float32] * 2
    assert module.layer_dtype == torch.bfloat16
    assert not torch.equal(module.body.weight, before)
    other = copy.deepcopy(module)
    other.vf.bias.data += 1e3
    batch = {Columns.OBS: torch.zeros(1, 4)}
    assert other.compute_values(batch) > module.compute_values(batch) + 900


def test_other_types_are_refused_where_they_are_given() -> None:
    assert PPOConfig().framework(torch_amp_dtype=torch.bfloat16).torch_amp_dtype == "bfloat16"  # type: ignore[arg-type]
    for value in ("float16", torch.float16):
        with pytest.raises(ConfigurationError, match="'bfloat16' or None"):
            PPOConfig().framework(torch_amp_dtype=value)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"'bfloat16' or None, got 'bf16'"):
        PPOConfig().framework(torch_amp_dtype="bf16")  # type: ignore[arg-type]


def test_a_gpu_without_bfloat16_is_refused(monkeypatch: Any) -> None:
    device, config = torch.device("cuda", 1), small(torch_amp_dtype="bfloat16")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda of: (7, 5))
    with pytest.raises(ConfigurationError, match=r"cuda:1 .* 7\.5.* 8\.0"):
        Execution(config, device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda of: (8, 0))
    Execution(config, device)


# -- compilation ---------------------------------------------------------------------------------------


def weights_after(**framework: Any) -> dict[str, Any]:
    config = small(train_batch_size_per_learner=60, minibatch_size=20, seed=3, **framework)
    with config.build() as algo:
        algo.train()
        return dict(algo.get_module().get_state())


@pytest.mark.parametrize(
    ("what", "backend"),
    [
        pytest.param("forward_train", "aot_eager", marks=pytest.mark.slow),
        ("forward_train", "eager"),
        pytest.param("complete_update", "eager", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_learner_learns_the_same(what: str, backend: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = weights_after(
        torch_compile_learner=True,
        torch_compile_learner_what_to_compile=what,
        torch_compile_learner_dynamo_backend=backend,
    )
    assert torch._dynamo.utils.counters["frames"]["ok"] >= 2  # x + 1, and what was to be compiled
    for name, value in weights_after().items():
        assert torch.allclose(torch.as_tensor(compiled[name]), torch.as_tensor(value), atol=1e-5), name


def test_a_copy_of_a_compiled_module_runs_its_own_networks() -> None:
    config = small().framework(torch_compile_learner=True, torch_compile_learner_dynamo_backend="eager")
    module = config.build_learner().module["default_policy"]
    other = copy.deepcopy(module)
    for parameter in other.parameters():
        parameter.data.zero_()
    outputs = [one.forward_train({Columns.OBS: torch.ones(1, 4)}) for one in (module, other)]
    assert [bool(out[Columns.ACTION_DIST_INPUTS].any()) for out in outputs] == [True, False]


def test_a_backend_that_cannot_be_used_is_refused_when_the_run_is_built(monkeypatch: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"has no such backend.*Did you mean 'inductor'"):
        weights_after(torch_compile_learner=True, torch_compile_learner_dynamo_backend="inducto")
    mode = {"torch_compile_learner_dynamo_mode": "nonsense"}
    with pytest.raises(ConfigurationError, match="'eager' has no modes"):
        weights_after(torch_compile_learner=True, torch_compile_learner_dynamo_backend="eager", **mode)
    with pytest.raises(ConfigurationError, match=r"'inductor' \(mode 'nonsense'\)"):
        weights_after(torch_compile_learner=True, **mode)


@pytest.mark.slow
@pytest.mark.parametrize("config_cls", [PPOConfig, IMPALAConfig, APPOConfig])
def test_a_compiled_update_is_compiled_again_only_a_few_times(config_cls: Any) -> None:
    torch._dynamo.reset()
    config = small(
        config_cls,
        train_batch_size_per_learner=60,
        minibatch_size=20,
        num_epochs=2,
        entropy_coeff=[[0, 0.1], [10_000, 0.0]],
        min_time_s_per_iteration=0,
        torch_compile_learner=True,
        torch_compile_learner_what_to_compile="complete_update",
        torch_compile_learner_dynamo_backend="aot_eager",
    )
    if config_cls is PPOConfig:
        config.training(kl_target=1e-6)  # so that the coefficient changes after each update
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True), config.build() as algo:
        for _ in range(12):
            results = algo.train()
    assert results["learners"]["default_policy"]["total_loss"]
