"""What a Learner promises, alone: hooks, sources, counters, optimizers, schedules, losses, bad gradients, state."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from rlzmq import IMPALAConfig, PPOConfig
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.names import ALL_MODULES
from rlzmq.core.update_plan import Schedule
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.learners import ranks
from rlzmq.learners.learner import Learner
from rlzmq.modules.rl_module import SelfSupervisedLossAPI
from tests.learners.cases import (
    ACTION_SPACE,
    LinearModule,
    SquareLearner,
    episode_batch,
    episodes,
    linear_spec,
    ppo_config,
    ppo_learner,
    rows,
    square_learner,
)
from tests.support.runs import small


def weights(learner: Learner, module_id: str = "default_policy") -> np.ndarray:
    state = learner.get_state("rl_module")["rl_module"][module_id]
    return np.concatenate([value.ravel() for value in state.values()])


HOOKS = {
    "before_gradient_based_update": "before",
    "should_module_be_updated": "should",
    "forward_train": "forward",
    "compute_losses": "losses",
    "compute_loss_for_module": "loss",
    "compute_gradients": "gradients",
    "postprocess_gradients": "postprocess",
    "postprocess_gradients_for_module": "postprocess",
    "apply_gradients": "apply",
    "after_gradient_based_update": "after",
}


def test_hooks_are_called_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = square_learner("a", "b", minibatch_size=4, num_epochs=1)
    calls: list[str] = []
    given: dict[str, Any] = {}

    def recorded(hook: str, name: str) -> Any:
        original = getattr(learner, hook)

        def call(*args: Any, **kwargs: Any) -> Any:
            module_id = kwargs.get("module_id", args[0] if hook.startswith("should") else "")
            calls.append(f"{name} {module_id}".strip())
            given[hook] = kwargs
            return original(*args, **kwargs)

        return call

    for hook, name in HOOKS.items():
        monkeypatch.setattr(learner, hook, recorded(hook, name))
    learner.update(batch={"a": rows(8), "b": rows(5)}, timesteps={"num_env_steps_sampled_lifetime": 70})
    losses, gradients = ["forward", "losses", "loss a", "loss b"], ["postprocess a", "postprocess b"]
    minibatch = [*losses, "gradients", "postprocess", *gradients, "apply"]
    assert calls == ["before", "should a", "should b", *minibatch, *minibatch, "after"]
    assert given["before_gradient_based_update"] == {"timesteps": {"num_env_steps_sampled_lifetime": 70}}


def test_exactly_one_data_source_is_needed() -> None:
    learner = square_learner()
    with pytest.raises(ValueError, match=r"exactly one of .* got none"):
        learner.update()
    with pytest.raises(ValueError, match="got batch, episodes"):
        learner.update(batch={"default_policy": rows(3)}, episodes=episodes(3))


def test_a_learner_takes_a_spec_or_a_module_and_not_both() -> None:
    with pytest.raises(ValueError, match="module_spec or module"):
        SquareLearner(config=ppo_config())
    module = linear_spec().build(seed=0)
    learner = SquareLearner(config=ppo_config(), module=module)
    learner.build()
    assert learner.module["default_policy"] is module


@pytest.mark.parametrize("policies_to_train", [[], lambda module_id, batch: False])
def test_with_nothing_to_train_an_update_is_counted_and_changes_no_weight(policies_to_train: Any) -> None:
    learner = square_learner("a", "b")
    learner.policies_to_train = policies_to_train
    before = weights(learner, "a")
    results = learner.update(batch={"a": rows(8), "b": rows(5)})
    assert set(results) == {"__all_modules__"}
    assert results["__all_modules__"]["num_gradient_updates"] == 0
    assert results["__all_modules__"]["weights_seq_no"] == 1
    assert np.array_equal(weights(learner, "a"), before)


def test_counters_count_env_steps_once_and_gradient_updates_apart() -> None:
    learner = ppo_learner(ppo_config(minibatch_size=8, num_epochs=2))
    for updates in (1, 2):
        results = learner.update(episodes=episodes(20, 30))
        everything = results["__all_modules__"]
        assert everything["num_env_steps_trained"] == 50
        assert everything["num_env_steps_trained_lifetime"] == 50 * updates
        assert everything["num_gradient_updates"] == 13
        assert everything["num_gradient_updates_lifetime"] == 13 * updates
        assert results["default_policy"]["num_module_steps_trained"] == 50
        assert results["default_policy"]["module_train_batch_size_mean"] == 8
        assert learner.weights_seq_no == updates


def test_results_can_be_read_once_after_several_updates() -> None:
    several, single = square_learner(), square_learner()
    for _ in range(3):
        assert several.update(batch=rows(8), with_results=False) == {}
        wanted = single.update(batch=rows(8))["default_policy"]
    assert several.results()["default_policy"] == wanted


def test_an_updates_stages_are_timed() -> None:
    learner = ppo_learner(ppo_config(minibatch_size=8, num_epochs=2))
    for _ in range(2):
        everything = learner.update(episodes=episodes(20, 30))["__all_modules__"]
        connector_s = everything["learner_connector"]["connector_pipeline_timer"]
        forward_s, backward_s = everything["learner_forward_timer"], everything["learner_backward_timer"]
        assert min(connector_s, forward_s, backward_s) > 0
        assert everything["learner_reduce_timer"] == 0.0
        assert connector_s + forward_s + backward_s < everything["learner_thread_update_timer"]


def test_the_lag_to_the_sampling_policy_is_measured() -> None:
    learner = square_learner()
    learner.weights_seq_no = 5
    versions = torch.tensor([3, 4, 5, 4])
    results = learner.update(batch={**rows(4), Columns.WEIGHTS_VERSION: versions})
    assert results["default_policy"]["diff_num_grad_updates_vs_sampler_policy"] == 1.0


def test_the_random_numbers_of_updates_are_independent() -> None:
    learner, drawn = ppo_learner(), np.empty((64, 1025))
    for learner.weights_seq_no in range(1025):
        with learner._running():
            drawn[:, learner.weights_seq_no] = learner._rng.random(64)
    counts = np.array([np.histogram2d(x[:-1], x[1:], 4, [(0, 1), (0, 1)])[0] for x in drawn])
    chi_squared = ((counts - 64) ** 2 / 64).sum((1, 2))  # of 15 degrees of freedom
    assert chi_squared.mean() < 15 + 5 * (30 / 64) ** 0.5


class NoisyLearner(SquareLearner):
    """Its loss draws from torch's global generator, as dropout does."""

    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: dict[str, Any], fwd_out: dict[str, Any]
    ) -> Tensor:
        outputs = fwd_out[Columns.ACTION_DIST_INPUTS]
        return (outputs * torch.rand(outputs.shape)).square().mean()


@pytest.mark.parametrize("seed", [11, None])
def test_noise_of_modules_and_losses_follows_from_the_seed_and_goes_on_in_a_restored_learner(
    seed: int | None,
) -> None:
    first, second = (square_learner(learner_class=NoisyLearner) for _ in range(2))
    if seed is None:
        first.seed = 123  # as drawn where the config has none
    first.update(batch=rows(16))
    torch.rand(3)
    second.set_state(first.get_state())
    before = torch.random.get_rng_state()
    for learner in (first, second):
        learner.update(batch=rows(16, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    np.testing.assert_array_equal(weights(first), weights(second))


class NaNLearner(SquareLearner):
    """Module "bad" has a NaN loss on every second minibatch."""

    num_calls = 0

    def compute_loss_for_module(self, *, module_id: str, **kwargs: Any) -> Tensor:
        loss = super().compute_loss_for_module(module_id=module_id, **kwargs)
        if module_id == "bad":
            self.num_calls += 1
            if self.num_calls % 2:
                return loss * float("nan")
        return loss


def test_no_step_is_taken_on_nan_gradients_but_on_the_others(caplog: pytest.LogCaptureFixture) -> None:
    learner = square_learner("bad", "good", learner_class=NaNLearner, minibatch_size=4, num_epochs=1)
    with caplog.at_level(logging.WARNING, "rlzmq"):
        results = learner.update(batch={"bad": rows(8), "good": rows(8)})
    assert results["bad"]["num_nonfinite_gradients_skipped"] == 1
    assert results["good"]["num_nonfinite_gradients_skipped"] == 0
    assert results["__all_modules__"]["num_nonfinite_gradients_skipped"] == 1
    (record,) = caplog.records
    assert "1 (module 'bad') of 2 minibatches" in record.getMessage()
    for module_id, num_steps in (("bad", 1), ("good", 2)):
        assert np.isfinite(weights(learner, module_id)).all()
        state = learner.get_optimizer(module_id).state_dict()["state"]
        assert all(torch.isfinite(value).all() for values in state.values() for value in values.values())
        assert all(int(values["step"]) == num_steps for values in state.values())
    caplog.clear()
    assert learner.update(batch={"good": rows(8)})["__all_modules__"]["num_nonfinite_gradients_skipped"] == 0
    assert not caplog.records


class SpoilingLearner(SquareLearner):
    """A hook that makes one element of a gradient infinite after the norm was taken."""

    def postprocess_gradients_for_module(self, **kwargs: Any) -> Any:
        gradients = super().postprocess_gradients_for_module(**kwargs)
        next(iter(gradients.values())).view(-1)[0] = float("inf")
        return gradients


def test_infinite_gradients_made_by_a_hook_are_found_too() -> None:
    learner = square_learner(learner_class=SpoilingLearner)
    before = weights(learner)
    results = learner.update(batch={"default_policy": rows(8)})
    assert results["default_policy"]["num_nonfinite_gradients_skipped"] > 0
    assert np.array_equal(weights(learner), before)


def test_optimizers_of_other_parameters_and_other_names_are_refused() -> None:
    learner = square_learner()
    module = learner.module["default_policy"]
    with pytest.raises(ValueError, match="exactly the 2 parameters"):
        learner.register_optimizer(
            module_id="default_policy",
            optimizer_name="wrong",
            optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
            params=list(module.layer.parameters()),
        )
    with pytest.raises(KeyError, match="Did you mean 'default_optimizer'"):
        learner.get_optimizer("default_policy", "defautl_optimizer")
    with pytest.raises(ValueError, match="an optimizer named 'default_optimizer'"):
        learner.configure_optimizers_for_module("default_policy", learner.config)


def test_a_constant_learning_rate_and_epsilon_are_the_configured_ones_after_a_restore() -> None:
    step = {"minibatch_size": None, "num_epochs": 1}
    slow, fast = (ppo_learner(ppo_config(lr=lr, adam_epsilon=lr / 1000, **step)) for lr in (1e-5, 1e-2))
    slow.update(episodes=episodes(20, 30))
    fast.set_state(slow.get_state())
    assert fast.get_optimizer("default_policy").param_groups[0]["eps"] == 1e-5
    again = ppo_learner(ppo_config(lr=1e-5, **step))
    again.set_state(slow.get_state())
    moved = []
    for learner in (again, fast):
        before = weights(learner)
        learner.update(episodes=episodes(20, 30))
        moved.append(float(np.abs(weights(learner) - before).max()))
    assert moved[1] > 100 * moved[0]


@pytest.mark.parametrize(("entropy_coeff", "expected"), [(0.2, 0.2), ([(0, 0.3), (9, 0.1)], 0.0)])
def test_a_constant_coefficient_is_the_configured_one_after_a_restore(
    entropy_coeff: Any, expected: float
) -> None:
    learner = ppo_learner(ppo_config(entropy_coeff=entropy_coeff))
    learner.set_state(ppo_learner().get_state())
    assert learner.coefficients["entropy_coeff"] == {"default_policy": expected}


def test_state_components_can_be_picked_and_misspelt_ones_are_refused() -> None:
    learner = square_learner("a", "b")
    beside = {"learner_connector", "metrics", "random", "extra"}
    assert set(learner.get_state()) == {"rl_module", "optimizer", "weights_seq_no", "counters", *beside}
    assert set(learner.get_state("rl_module/b")["rl_module"]) == {"b"}
    assert "optimizer" not in learner.get_state(not_components="optimizer")
    with pytest.raises(ValueError, match="Did you mean 'optimizer'"):
        learner.get_state("optimizr")
    with pytest.raises(ValueError, match="no component 'weights'"):
        learner.set_state({"weights": {}})


def test_optimizer_state_of_another_architecture_is_refused() -> None:
    state = square_learner("a").get_state()
    with pytest.raises(KeyError, match="module 'a' has no optimizer"):
        square_learner("b").set_state({"optimizer": state["optimizer"]})


def test_batches_are_trained_as_one_and_iterators_batch_by_batch() -> None:
    whole = rows(12)
    parts = [{Columns.OBS: whole[Columns.OBS][:5]}, {Columns.OBS: whole[Columns.OBS][5:]}]
    one, several = square_learner(), square_learner()
    one.update(batch=whole)
    several.update(batches=parts)
    assert one.parameter_hash() == several.parameter_hash()

    learner = square_learner()
    results = learner.update(data_iterators=[iter([rows(4), rows(4), rows(4)])], num_total_minibatches=2)
    assert results["__all_modules__"]["num_gradient_updates"] == 2
    assert results["__all_modules__"]["num_env_steps_trained"] == 8
    twin = square_learner()
    losses = [twin.update(batch=rows(4))["default_policy"]["total_loss"] for _ in range(2)]
    assert results["default_policy"]["total_loss"] == pytest.approx(np.mean(losses))
    with pytest.raises(ValueError, match="at least one batch"):
        learner.update(batches=[])
    with pytest.raises(ValueError, match="'rewards'"):
        learner.update(batches=[rows(3), rows(3) | {"rewards": torch.zeros(3)}])
    with pytest.raises(ValueError, match=r"of \['a', 'b'\], got the keys \['obs'\]"):
        square_learner("a", "b").update(batch=rows(3))


def test_numpy_batches_and_masked_rows_are_taken() -> None:
    mask = np.array([True, False, True, True])
    full = rows(4)[Columns.OBS].numpy()
    masked, dense = square_learner(minibatch_size=None), square_learner(minibatch_size=None)
    results = masked.update(batch={Columns.OBS: full, Columns.LOSS_MASK: mask})
    dense.update(batch={Columns.OBS: full[mask]})
    assert masked.parameter_hash() == dense.parameter_hash()
    assert results["default_policy"]["num_module_steps_trained"] == 3


def test_without_data_there_is_no_update() -> None:
    learner = ppo_learner()
    learner.update(episodes=episode_batch(16))
    before = learner.get_state()
    for nothing in ([], episode_batch(16)[:0], [episode_batch(16)[0][:0]]):
        results = learner.update(episodes=nothing, timesteps={"num_env_steps_sampled_lifetime": 10**6})
        assert results["__all_modules__"]["num_env_steps_trained"] == 0
        assert results["__all_modules__"]["weights_seq_no"] == learner.weights_seq_no == 1
    after = learner.get_state()
    assert after["counters"] == before["counters"]
    assert learner.update(episodes=episode_batch(16))["__all_modules__"]["weights_seq_no"] == 2


@pytest.mark.parametrize("as_numpy", [False, True])
@pytest.mark.parametrize(
    ("observation", "reward", "refused"),
    [
        (np.zeros(4), "r", "Episode 'e', column 'rewards': item 0: .* one number, got str"),
        ("o", 1.0, "column 'obs': expected numbers to learn from, got str_"),
    ],
)
def test_learning_asks_for_numbers(as_numpy: bool, observation: Any, reward: Any, refused: str) -> None:
    episode = SingleAgentEpisode("e")
    episode.add_env_reset(observation)
    outputs = {"action_dist_inputs": np.zeros(2, np.float32), "action_logp": np.float32(0)}
    for _ in range(4):
        episode.add_env_step(observation, 1, reward, extra_model_outputs=outputs)
    if as_numpy:
        episode.to_numpy()
    with pytest.raises(ValueError, match=refused):
        ppo_learner().update(episodes=[episode])


def test_a_run_in_one_process_samples_on_as_many_torch_threads_as_it_trains() -> None:
    used = []

    class Env(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            used.append(torch.get_num_threads())
            return super().step(action)

    before = torch.get_num_threads()
    with small(wrappers=[Env], torch_num_threads=before + 1).build() as algo:
        algo.train()
    assert set(used) == {before + 1}
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("config_class", "num_env_runners", "observation_shape", "num_threads"),
    [
        (PPOConfig, 2, (42, 42, 3), 3),
        (PPOConfig, 2, (4,), 1),
        (IMPALAConfig, 1, (42, 42, 3), 2),
        (IMPALAConfig, 3, (42, 42, 3), 1),
    ],
)
def test_convolutions_are_trained_on_all_cores_that_runners_leave(
    monkeypatch: pytest.MonkeyPatch,
    config_class: Any,
    num_env_runners: int,
    observation_shape: tuple[int, ...],
    num_threads: int,
) -> None:
    monkeypatch.setattr(ranks, "num_usable_cores", lambda: 3)
    used = []
    before = torch.get_num_threads()
    box = gym.spaces.Box(0, 255, observation_shape, np.uint8)
    config = config_class().environment(observation_space=box, action_space=ACTION_SPACE)
    learner = config.env_runners(num_env_runners=num_env_runners).build_learner()
    monkeypatch.setattr(
        learner, "before_gradient_based_update", lambda **_: used.append(torch.get_num_threads())
    )
    learner.update(batch={})
    assert (used, torch.get_num_threads()) == ([num_threads], before)


def test_an_update_counts_denormal_numbers_as_zero_and_leaves_the_thread_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner, least = square_learner(), torch.tensor(1e-39)
    seen: list[float] = []
    monkeypatch.setattr(learner, "before_gradient_based_update", lambda **_: seen.append(float(least * 2)))
    for flushes in (False, True):
        torch.set_flush_denormal(flushes)
        try:
            learner.update(batch={})
            seen.append(float(least * 2))
        finally:
            torch.set_flush_denormal(False)
    assert seen == [0.0, pytest.approx(2e-39), 0.0, 0.0]


def test_a_process_forked_after_an_update_on_several_threads_can_use_torch() -> None:
    program = """
import os, signal, torch
from rlzmq.learners.ranks import torch_threads

def multiply():
    matrix = torch.ones(600, 600)
    return matrix @ matrix

torch.set_num_threads(2)  # torch's own number on a machine with two cores
with torch_threads(2):
    multiply()
pid = os.fork()
if not pid:
    signal.alarm(60)  # ends it if it hangs
    multiply()
    os._exit(7)
os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=100).returncode == 7


class CuriousModule(LinearModule, SelfSupervisedLossAPI):
    def compute_self_supervised_loss(self, *, fwd_out: dict[str, Any], **kwargs: Any) -> Any:
        loss = (fwd_out[Columns.ACTION_DIST_INPUTS] - 1.0).square().mean()
        return {"total_loss": loss, "surprise": loss.detach() * 2}


def test_a_module_with_its_own_loss_is_trained_on_it() -> None:
    one_pass: dict[str, Any] = {"minibatch_size": None, "num_epochs": 1}
    learner = square_learner(learner_class=Learner, module_class=CuriousModule, **one_pass)
    results = learner.update(batch=rows(8))["default_policy"]
    assert results["surprise"] == pytest.approx(2 * results["total_loss"])


def test_a_learner_without_a_loss_says_so() -> None:
    learner = square_learner(learner_class=Learner)
    with pytest.raises(NotImplementedError, match="override compute_loss_for_module"):
        learner.update(batch=rows(8))


def test_an_optimizer_of_all_modules_steps_with_every_minibatch() -> None:
    class SharedLearner(SquareLearner):
        def build(self) -> None:
            super().build()
            self.temperature = torch.nn.Parameter(torch.ones(()))
            self.register_optimizer(
                optimizer=torch.optim.SGD([self.temperature], lr=0.1), params=[self.temperature]
            )

        def compute_loss_for_module(self, **kwargs: Any) -> Tensor:
            return super().compute_loss_for_module(**kwargs) + self.temperature

    learner = square_learner(learner_class=SharedLearner, minibatch_size=None, num_epochs=3)
    learner.update(batch=rows(8))
    assert learner.temperature.item() == pytest.approx(0.7)  # type: ignore[attr-defined]
    assert learner.get_optimizer(ALL_MODULES) is not None


# -- schedules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ([(0, 1.0)], "1 point"),
        ([(5, 1.0), (10, 0.0)], "5 env steps instead of 0"),
        ([(0, 1.0), (10, 0.5), (10, 0.0)], "rising env steps"),
        ([(0, 1.0), 3], "the point 3"),
        ("fast", "'fast'"),
        (True, "True"),
    ],
)
def test_wrong_schedules_are_refused_with_their_name(value: object, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=f"entropy_coeff.*{complaint}"):
        Schedule(value, name="entropy_coeff")  # type: ignore[arg-type]


# -- what a loss may return ----------------------------------------------------------------------------


BATCH = {"default_policy": {Columns.OBS: torch.ones(6, 4)}}


class GivenLoss(Learner):
    make: Callable[[Tensor], Any]

    def compute_loss_for_module(self, *, fwd_out: dict[str, Any], **kwargs: Any) -> Any:
        return type(self).make(fwd_out[Columns.ACTION_DIST_INPUTS].square())


def learner_with(make: Callable[[Tensor], Any]) -> Learner:
    return square_learner(learner_class=type("GivenLoss", (GivenLoss,), {"make": staticmethod(make)}))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda x: None, "got None. Does it end with `return loss`"),
        (lambda x: x.mean(-1), r"got a tensor of shape \(32,\). Take its mean"),
        (lambda x: x.mean().item(), "got a float. Keep it a tensor"),
        (lambda x: x.mean().detach(), "depends on no trainable parameter"),
    ],
)
def test_a_loss_that_is_none_says_what_it_is(make: Callable[[Tensor], Any], text: str) -> None:
    learner = learner_with(make)
    before = learner.module.get_state()["default_policy"]
    with pytest.raises(ConfigurationError, match=f"default_policy.*{text}"):
        learner.update(batch=BATCH)
    assert learner.weights_seq_no == 0
    after = learner.module.get_state()["default_policy"]
    assert all((before[name] == value).all() for name, value in after.items())


def test_a_loss_of_one_element_is_one_number() -> None:
    assert (
        learner_with(lambda x: x.mean().reshape(1, 1)).update(batch=BATCH)["default_policy"]["total_loss"] > 0
    )


def test_a_gradient_step_by_hand_needs_no_update_before() -> None:
    learner = square_learner()
    layer = learner.module["default_policy"].layer
    before = layer.weight.detach().clone()
    outputs = learner.forward_train(BATCH)
    gradients = learner.compute_gradients(learner.compute_losses(fwd_out=outputs, batch=BATCH))
    assert set(gradients) == {layer.weight, layer.bias}
    learner.apply_gradients(learner.postprocess_gradients(gradients))
    assert not torch.equal(layer.weight, before)


# -- delayed optimizers --------------------------------------------------------------------------------


EVERY = 3
ONES = {Columns.OBS: torch.ones(8, 4)}


class Delayed(Learner):
    """One layer is trained with every minibatch, the other with each third one, whose loss is computed only then."""

    def configure_optimizers_for_module(self, module_id: str, config: Any) -> None:
        module = self.module[module_id]
        for name, layer, every in (("often", module.layer, 1), ("rarely", module.extra, EVERY)):
            params = list(layer.parameters())
            self.register_optimizer(
                module_id=module_id, optimizer_name=name, optimizer=torch.optim.Adam(params, 0.1),
                params=params, every=every,
            )  # fmt: skip

    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: dict[str, Any], fwd_out: dict[str, Any]
    ) -> torch.Tensor:
        loss: torch.Tensor = fwd_out[Columns.ACTION_DIST_INPUTS].square().mean()
        if self.steps_optimizer(module_id, "rarely"):
            rare_loss = self.module[module_id].extra(batch[Columns.OBS]).square().mean()
            self.log_stats(module_id, {"rare_loss": rare_loss, "step": float(len(self.steps))})
            loss = loss + rare_loss
        return loss

    def apply_gradients(self, gradients_dict: Any) -> None:
        module = self.module["default_policy"]
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        super().apply_gradients(gradients_dict)
        changed = {
            name.split(".")[-2] for name, p in module.named_parameters() if not torch.equal(p, before[name])
        }
        self.steps.append(sorted(changed))

    steps: list[list[str]]


def test_a_delayed_optimizer_steps_as_rarely_as_asked_and_its_loss_stays_in_results() -> None:
    learner: Any = square_learner(learner_class=Delayed)
    learner.steps = []
    options: dict[str, Any] = {"num_epochs": 1, "minibatch_size": 8}
    results = [learner.update(batch=ONES, **options)["default_policy"] for _ in range(2 * EVERY)]
    assert learner.steps == [["extra", "layer"], *[["layer"]] * (EVERY - 1)] * 2
    assert [result["step"] for result in results] == [0.0] * EVERY + [float(EVERY)] * EVERY
    assert all(result["rare_loss"] > 0 for result in results)
    assert "gradients_rarely_global_norm" in results[-1]


def test_a_module_that_a_run_no_longer_trains_has_no_old_values() -> None:
    learner: Any = square_learner("a", "b")
    columns = {Columns.OBS: torch.ones(8, 4)}
    learner.update(batch={"a": columns, "b": columns})
    assert "total_loss" not in learner.update(batch={"a": columns}).get("b", {})
