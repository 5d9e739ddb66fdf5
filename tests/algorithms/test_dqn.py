"""DQN's losses against numbers computed by hand, its exploration, and the errors of settings that cannot work."""

from __future__ import annotations

import math
import sys
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlzmq import (
    Columns,
    ConfigurationError,
    DQNConfig,
    EpisodeBatch,
    MultiAgentEpisode,
    SingleAgentEpisode,
)
from rlzmq.algorithms.dqn.dqn_learner import (
    distribution_loss,
    distribution_stats,
    mean_loss,
    project_distribution,
)
from rlzmq.algorithms.dqn.dqn_module import NoisyLinear
from rlzmq.runners.vector_env_runners import SingleAgentEnvRunner
from tests.support.losses import loss_of, one_layer, set_layer, transitions
from tests.support.runs import small

STATES = gym.spaces.Box(0.0, 1.0, (3,), np.float32)


def config(**training: Any) -> Any:
    """Three one-hot states; Q(s, a) is the weight of the head's only layer."""
    actions = gym.spaces.Discrete(2)
    return one_layer(DQNConfig, actions, STATES, **{"gamma": 0.5, "dueling": False, **training})


def learner_with(made: DQNConfig, online: Any, target: Any) -> Any:
    learner = made.build_learner()
    module: Any = learner.module["default_policy"]
    set_layer(module.af, online, 0.0)
    set_layer(module._target_af, target, 0.0)
    return learner


def loss_of_row(learner: Any, **columns: Any) -> float:
    row = {"actions": 0, "n_step": 1, "weights": 1.0, **columns}
    return float(loss_of(learner, transitions(**{name: [value] for name, value in row.items()})).detach())


# rows: actions; columns: states s0, s1, s2
ONLINE = [[1.0, 1.0, 0.0], [0.0, 3.0, 0.0]]
TARGET = [[0.0, 10.0, 0.0], [0.0, 4.0, 0.0]]
S0, S1 = [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]


@pytest.mark.parametrize(("double_q", "bootstrap"), [(True, 4.0), (False, 10.0)])
def test_the_next_action_is_chosen_by_the_trained_network_only_with_double_q(
    double_q: bool, bootstrap: float
) -> None:
    learner = learner_with(config(double_q=double_q, td_error_loss_fn="mse"), ONLINE, TARGET)
    row = {"obs": S0, "new_obs": S1, "rewards": 2.0}
    assert loss_of_row(learner, **row) == pytest.approx((2.0 + 0.5 * bootstrap - 1.0) ** 2)
    assert loss_of_row(learner, **row, n_step=3) == pytest.approx((2.0 + 0.125 * bootstrap - 1.0) ** 2)
    assert loss_of_row(learner, **row, terminateds=True) == pytest.approx((2.0 - 1.0) ** 2)


def test_a_batch_from_elsewhere_has_single_rewards_of_equal_weight() -> None:
    learner = learner_with(config(td_error_loss_fn="mse", lr=0.0), ONLINE, TARGET)
    batch = {
        Columns.OBS: np.array([S0, S1], np.float32),
        Columns.NEXT_OBS: np.array([S1, S1], np.float32),
        Columns.ACTIONS: np.array([0, 1]),
        Columns.REWARDS: np.array([2.0, 5.0], np.float32),
        Columns.TERMINATEDS: np.array([False, True]),
    }
    loss = learner.update(batch=batch)["default_policy"]["qf_loss"]
    assert loss == pytest.approx(((2.0 + 0.5 * 4.0 - 1.0) ** 2 + (5.0 - 3.0) ** 2) / 2)


def test_actions_of_a_space_that_starts_elsewhere() -> None:
    made = config(td_error_loss_fn="mse").environment(action_space=gym.spaces.Discrete(2, start=5))
    learner = learner_with(made, ONLINE, TARGET)
    loss = loss_of_row(learner, obs=S1, new_obs=S0, rewards=1.0, actions=6, terminateds=True)
    assert loss == pytest.approx((1.0 - 3.0) ** 2)


def test_huber_and_importance_weights() -> None:
    result = mean_loss(
        q_BA=torch.tensor([[1.0, 9.0], [9.0, 5.0]]),
        actions_B=torch.tensor([0, 1]),
        next_q_B=torch.tensor([1.0, 8.0]),
        rewards_B=torch.tensor([1.0, 2.0]),
        discounts_B=torch.tensor([0.5, 0.0]),
        weights_B=torch.tensor([1.0, 0.25]),
        kind="huber",
    )
    assert result.td_errors_B.tolist() == [0.5, 3.0]
    assert float(result.loss) == pytest.approx((1.0 * 0.5 * 0.5**2 + 0.25 * (3.0 - 0.5)) / 2)


def test_a_dueling_heads_advantages_are_centred_over_actions() -> None:
    made = config(dueling=True, num_atoms=2)
    module: Any = made.build_learner().module["default_policy"]
    set_layer(module.af, 0.0, [1.0, 2.0, 3.0, 6.0])  # action by action
    set_layer(module.vf, 0.0, [10.0, 20.0])
    logits = module.compute_q_values({Columns.OBS: torch.tensor([S0])})["qf_logits"]
    assert logits.tolist() == [[[10.0 + 1.0 - 2.0, 20.0 + 2.0 - 4.0], [10.0 + 3.0 - 2.0, 20.0 + 6.0 - 4.0]]]


@pytest.mark.parametrize("training", [{}, {"num_atoms": 3}, {"noisy": True}])
def test_actions_rank_as_by_their_values(training: dict[str, Any]) -> None:
    module: Any = config(dueling=True, **training).build_learner().module["default_policy"]
    with torch.no_grad():
        module.vf.layers[-1].bias.add_(5.0)
    module.eval()
    batch = {Columns.OBS: torch.eye(3)}
    ranked, values = (
        function(batch)["qf_preds"] for function in (module.rank_actions, module.compute_q_values)
    )
    assert torch.equal(ranked.argsort(-1), values.argsort(-1))
    assert torch.equal(ranked, values) == bool(training)
    module.compute_q_values = lambda batch: {"qf_preds": -values}
    assert torch.equal(module.rank_actions(batch)["qf_preds"], -values)


def test_a_distribution_is_projected_to_the_atoms() -> None:
    atoms = torch.tensor([-1.0, 0.0, 1.0])
    projected = project_distribution(
        next_probs_BZ=torch.tensor([[0.25, 0.25, 0.5]] * 4),
        rewards_B=torch.tensor([0.25, 0.0, 9.0, -0.5]),
        discounts_B=torch.tensor([0.5, 1.0, 1.0, 0.0]),
        atoms_Z=atoms,
    )
    # 0.25 + 0.5 z = -0.25, 0.25, 0.75
    first = [0.25 * 0.25, 0.25 * 0.75 + 0.25 * 0.75 + 0.5 * 0.25, 0.25 * 0.25 + 0.5 * 0.75]
    assert projected[0].tolist() == pytest.approx(first)
    assert projected[1].tolist() == [0.25, 0.25, 0.5]  # on the atoms
    assert projected[2].tolist() == [0.0, 0.0, 1.0]  # clipped
    assert projected[3].tolist() == [0.5, 0.5, 0.0]  # terminated: the reward alone
    result = distribution_loss(
        logits_BZ=torch.log(torch.tensor([[0.2, 0.3, 0.5], [0.2, 0.3, 0.5]])),
        targets_BZ=projected[2:],
        weights_B=torch.tensor([1.0, 0.5]),
    )
    cross_entropies = [-np.log(0.5), -0.5 * np.log(0.2) - 0.5 * np.log(0.3)]
    assert result.td_errors_B.tolist() == pytest.approx(cross_entropies)
    assert float(result.loss) == pytest.approx((cross_entropies[0] + 0.5 * cross_entropies[1]) / 2)


def episode(*, terminated: bool = False, truncated: bool = False) -> EpisodeBatch:
    """s0 -> s1 -> s2 -> s0 with rewards 1, 2, 4."""
    made = SingleAgentEpisode(
        observations=[np.eye(3, dtype=np.float32)[i] for i in (0, 1, 2, 0)],
        observation_space=STATES,
        actions=[np.int64(0)] * 3,
        action_space=gym.spaces.Discrete(2),
        rewards=[1.0, 2.0, 4.0],
        terminated=terminated,
        truncated=truncated,
        len_lookback_buffer=0,
    )
    return EpisodeBatch.from_episodes([made])


def test_how_much_the_actions_distributions_differ() -> None:
    probs_BAZ = torch.tensor([[[0.5, 0.5], [0.0, 1.0]], [[1.0, 0.0], [0.5, 0.5]]])  # means: [¾, ¼], [¼, ¾]
    stats = distribution_stats(probs_BAZ, torch.tensor([-1.0, 3.0]))
    entropy = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    assert {name: float(value) for name, value in stats.items()} == pytest.approx(
        {
            "action_dist_mean_entropy": entropy,
            "expectations_abs_diff": 2.0,
            "dist_total_variation_dist": 0.5,
            "dist_max_abs_distance": 0.5,
        }
    )
    assert distribution_stats(probs_BAZ[:, :1], torch.tensor([-1.0, 3.0])).keys() == {
        "action_dist_mean_entropy"
    }
    learner = config(num_atoms=3, train_batch_size_per_learner=3, training_intensity=1.0).build_learner()
    results = learner.update(episodes=episode(terminated=True))["default_policy"]
    assert stats.keys() <= results.keys()


def test_target_networks_follow_after_so_many_sampled_steps() -> None:
    made = config(
        train_batch_size_per_learner=3, training_intensity=2.0, target_network_update_freq=6, tau=0.25
    )
    learner: Any = learner_with(made, ONLINE, TARGET)
    module = learner.module["default_policy"]
    target = module._target_af.layers[0].weight
    for num_updates, is_due in ((0, False), (1, True), (1, False), (2, True)):
        before = target.clone()
        results = learner.update(
            episodes=episode(truncated=True),
            timesteps={"num_env_steps_sampled_lifetime": learner.source.num_added + 3},
        )
        assert results["default_policy"]["num_target_updates"] == num_updates
        assert torch.equal(before, target) != is_due
    assert results["default_policy"]["last_target_update_ts"] == 12
    other: Any = made.build_learner()
    other.set_state(learner.get_state())
    assert (other.num_target_updates, other.last_target_update_ts) == (2, 12)


def test_exploration_follows_the_runs_env_steps() -> None:
    made = config(epsilon=[(0, 1.0), (100, 0.2)]).environment(
        "CartPole-v1", observation_space=None, action_space=None
    )
    made.env_runners(num_env_runners=2).rl_module(model_config={"fcnet_hiddens": [4]})
    made.update_from_dict({"observation_space": None, "action_space": None})
    runners = [SingleAgentEnvRunner(config=made, worker_index=i, num_workers=2) for i in (1, 2)]
    weights = runners[0].get_weights_layout().snapshot(runners[0].multi_rl_module)
    for runner in runners:
        least = []
        for num_env_steps in (50, 1000):
            runner.set_weights(weights, version=0, num_env_steps=num_env_steps)
            batch = runner.sample_lease(2)
            probabilities = np.exp(batch.columns[Columns.ACTION_DIST_INPUTS][batch.step_slots()])
            assert probabilities.sum(-1) == pytest.approx(1.0)
            least.append(probabilities.min(-1))
        # Of two actions each gets half of epsilon; the second of a runner's steps is the run's fourth.
        assert least[0] == pytest.approx([0.3, 0.3 - 2 * 0.004])
        assert least[1] == pytest.approx([0.1, 0.1])


def test_masked_actions_are_never_explored() -> None:
    space = gym.spaces.Dict({"observations": STATES, "action_mask": gym.spaces.MultiBinary(3)})
    made = config(epsilon=0.9).environment(observation_space=space, action_space=gym.spaces.Discrete(3))
    module: Any = made.build_learner().module["default_policy"]
    obs = {"observations": torch.tensor([S0, S1]), "action_mask": torch.tensor([[1, 0, 1], [0, 0, 0]])}
    probabilities = module.forward_exploration({Columns.OBS: obs}, t=0)[Columns.ACTION_DIST_INPUTS].exp()
    assert probabilities[0, 1] == 0.0
    assert sorted(probabilities[0].tolist()) == pytest.approx([0.0, 0.45, 0.55])
    values = module.forward_target({Columns.OBS: obs})["qf_preds"]
    assert (values < -1e30).tolist() == [[False, True, False], [False] * 3], "an episode's end may allow none"


def test_noisy_weights_are_factorised_and_learned() -> None:
    layer = NoisyLinear(4, 3, 0.5)
    assert layer.weight_sigma.unique().tolist() == [0.5 / 2.0]  # σ0 / √inputs
    x = torch.eye(4)
    with torch.no_grad():
        layer.eval()
        without = layer(x)
        assert torch.equal(without, x @ layer.weight.T + layer.bias)
        layer.fix_noise(torch.Generator().manual_seed(7))
        drawn = torch.randn(7, generator=torch.Generator().manual_seed(7)).tolist()
        ins, outs = ([math.copysign(math.sqrt(abs(n)), n) for n in part] for part in (drawn[:4], drawn[4:]))
        noise = layer(x) - without
        for i, of_input in enumerate(ins):
            for o, of_output in enumerate(outs):
                assert float(noise[i, o]) == pytest.approx(
                    0.25 * (of_output * of_input + of_output), abs=1e-6
                )
        layer.fix_noise(None)
        assert torch.equal(layer(x), without)
    layer.train()
    layer(x).sum().backward()
    assert layer.weight_sigma.grad is not None
    assert layer.weight_sigma.grad.abs().sum() > 0.0


def test_each_environment_of_each_runner_has_its_own_noise_and_a_run_repeats() -> None:
    made = config(noisy=True, epsilon=0.0, sigma0=50.0).environment(Corridor)
    made.env_runners(num_envs_per_env_runner=3)

    def explored(worker_index: int, seed: int) -> list[list[int]]:
        runner: Any = SingleAgentEnvRunner(config=made.copy().debugging(seed=seed), worker_index=worker_index)
        batch = {Columns.OBS: torch.zeros(3, dtype=torch.int64)}  # the same observation in all environments
        try:
            outputs = [runner.module.forward_exploration(batch, t=t) for t in range(20)]
        finally:
            runner.stop()
        return [logits.argmax(-1).tolist() for logits in (one[Columns.ACTION_DIST_INPUTS] for one in outputs)]

    mine = explored(1, 0)
    assert len({tuple(of_env) for of_env in zip(*mine, strict=True)}) == 3
    assert all(set(of_env) == {0, 1} for of_env in zip(*mine, strict=True)), "another one in each step"
    assert explored(1, 0) == mine
    assert explored(2, 0) != mine
    assert explored(1, 1) != mine


class Corridor(gym.Env[Any, Any]):
    """Four places in a row; going right (1) from the last one ends the episode with the only reward."""

    def __init__(self, env_config: Any = None) -> None:
        self.observation_space, self.action_space = gym.spaces.Discrete(4), gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._place, self._num_steps = 0, 0
        return self._place, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._num_steps += 1
        is_over = self._place == 3 and action == 1
        self._place = min(max(self._place + (1 if action == 1 else -1), 0), 3)
        return self._place, float(is_over), is_over, self._num_steps == 20, {}


@pytest.mark.parametrize(
    "training",
    [
        {"n_step": (1, 3)},
        {"num_atoms": 11, "v_min": 0.0, "v_max": 1.0, "noisy": True},
        {"replay_buffer_config": {"type": "EpisodeReplayBuffer"}, "dueling": False, "double_q": False},
    ],
    ids=["n-step", "noisy atoms", "plain"],
)
def test_dqn_learns_to_walk_right_in_600_steps(training: dict[str, Any]) -> None:
    sampling = {"num_envs_per_env_runner": 1, "rollout_fragment_length": 12, "epsilon": 0.5}
    learning = {"lr": 5e-3, "gamma": 0.8, "train_batch_size": 32, "training_intensity": 12.0}
    made = small(
        DQNConfig,
        Corridor,
        **{**sampling, **learning, **training},
        target_network_update_freq=24,
        num_steps_sampled_before_learning_starts=48,
        min_sample_timesteps_per_iteration=600,
        model_config={"fcnet_hiddens": [16]},
    )
    with made.build() as algo:
        algo.train()
        q = algo.get_module().compute_q_values({Columns.OBS: torch.arange(4)})["qf_preds"]
    assert q.argmax(-1).tolist() == [1, 1, 1, 1]
    assert q[:, 1].tolist() == pytest.approx([0.8**3, 0.8**2, 0.8, 1.0], abs=0.15)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda c: c.training(n_step=(3, 2)), r"n_step=\(3, 2\).*least > most"),
        (lambda c: c.training(replay_buffer_config={"prioritized_replay_alpha": 0.5}), "no such key"),
        (lambda c: c.training(replay_buffer_config={"type": "MultiAgentReplayBuffer"}), "a ReplayBuffer"),
        (lambda c: c.training(replay_buffer_config={"type": "MultiAgentEpisodeReplayBuffer"}), "multi_agent"),
        (lambda c: c.training(replay_buffer_config={"alpha": -1.0}), ">= 0, got -1"),
        (lambda c: c.training(training_intensity=0.0), "training_intensity"),
        (lambda c: c.training(num_epochs=3), "one gradient step"),
        (lambda c: c.training(minibatch_size=8), "one gradient step"),
        (lambda c: c.training(epsilon=[(0, 1.0)]), "at least two points"),
        (lambda c: c.training(num_atoms=3, v_min=1.0, v_max=1.0), "v_min < v_max"),
        (
            lambda c: c.training(
                train_batch_size_per_learner=60, replay_buffer_config={"capacity": 100}
            ).learners(num_learners=2),
            r"leaves 50 env steps for each of 2 learners.*to 120",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(change: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        change(config()).validate()


def test_each_modules_td_errors_become_priorities_of_its_own_steps() -> None:
    made = config(
        td_error_loss_fn="mse",
        train_batch_size_per_learner=20,
        training_intensity=20.0,
        replay_buffer_config={"alpha": 1.0, "beta": 0.0, "capacity": 100},
        lr=1e-9,
    ).multi_agent(policies={"p", "q"}, policy_mapping_fn=lambda agent_id, episode: agent_id)
    learner: Any = made.build_learner()
    for module_id, value in (("p", 3.0), ("q", 5.0)):
        module = learner.module[module_id]
        set_layer(module.af, 0.0, value)
        set_layer(module._target_af, 0.0, value)
    episode = MultiAgentEpisode(agent_to_module_mapping_fn=lambda agent_id, episode: agent_id)
    states = np.eye(3, dtype=np.float32)
    episode.add_env_reset(observations={"p": states[0], "q": states[0]})
    episode.add_env_step(
        {"p": states[1], "q": states[1]},
        {"p": 0, "q": 1},
        {"p": 1.0, "q": 2.0},
        terminateds={"__all__": True},
    )
    results = learner.update(episodes=[episode.to_numpy()])
    # All rows are the one terminal step of each agent: |reward - q|.
    stores = {m: buffer._store for m, buffer in learner.source.buffer.buffers.items()}
    priorities = {m: store.tree.get(store.ordered_steps()).tolist() for m, store in stores.items()}
    assert priorities == {"p": [pytest.approx(2.0)], "q": [pytest.approx(3.0)]}
    assert (results["p"]["qf_mean"], results["q"]["qf_mean"]) == (pytest.approx(3.0), pytest.approx(5.0))


@pytest.mark.parametrize("num_learners", [0, 1, 2])
def test_a_round_of_fragments_trains_a_batch_unless_an_intensity_is_given(num_learners: int) -> None:
    made = config(n_step=(2, 5), train_batch_size=32)
    made.env_runners(num_env_runners=3, num_envs_per_env_runner=2).learners(num_learners=num_learners)
    plan = made.update_plan()
    assert plan.fragment_length == 5
    assert (plan.num_env_steps, plan.train_ratio) == (30, 32 / 30)
    assert plan.keeps_episodes
    assert made.training(training_intensity=4.0).update_plan().train_ratio == 4.0
    assert not made.training(n_step=1).update_plan().keeps_episodes


def test_a_step_takes_few_python_calls() -> None:
    """One env step and one minibatch, with the default settings. Most of a small network's step is calls."""
    made = DQNConfig().environment("CartPole-v1").debugging(seed=0)
    made.reporting(min_sample_timesteps_per_iteration=100, min_time_s_per_iteration=0)
    made.training(num_steps_sampled_before_learning_starts=100)
    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    with made.build() as algo:
        for _ in range(2):
            before = algo.train()["num_env_steps_sampled_lifetime"]
        profiler = sys.getprofile()
        sys.setprofile(count)
        try:
            num_steps = algo.train()["num_env_steps_sampled_lifetime"] - before
        finally:
            sys.setprofile(profiler)
    assert num_calls / num_steps < 600
