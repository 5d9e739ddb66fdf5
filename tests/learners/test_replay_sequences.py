"""Sequences from a replay buffer: their burn-in, states and masks, and DQN's loss on them against one by hand."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.nn import functional

from rlzmq import (
    Columns,
    ConfigurationError,
    DQNConfig,
    EpisodeBatch,
    MultiAgentEpisode,
    MultiRLModuleSpec,
    RLModuleSpec,
    SingleAgentEpisode,
)
from rlzmq.algorithms.dqn.dqn_module import DefaultDQNModule
from rlzmq.core.tree import tree_leaves
from rlzmq.learners.replay_learner import BurnIn
from rlzmq.replay import EpisodeReplayBuffer
from tests.support.losses import assert_close
from tests.support.runs import ShortEnv, small


class OnlyTransitions(EpisodeReplayBuffer):
    draws_sequences = False


CELL, LONGEST, BURN_IN, GAMMA = 4, 6, 3, 0.9
OBSERVATIONS = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)


def config(*, model: Any = None, **training: Any) -> Any:
    lstm = {"fcnet_hiddens": [5], "use_lstm": True, "lstm_cell_size": CELL, "max_seq_len": LONGEST}
    settings = {
        "gamma": GAMMA,
        "replay_buffer_config": {"type": "EpisodeReplayBuffer", "capacity": 1000},
        "burn_in_len": BURN_IN,
        "num_steps_sampled_before_learning_starts": 0,
        "td_error_loss_fn": "mse",
    }
    spaces = {"observation_space": OBSERVATIONS, "action_space": gym.spaces.Discrete(2)}
    model = {**lstm, **(model or {})}
    return small(
        DQNConfig,
        None,
        num_envs_per_env_runner=1,
        seed=0,
        model_config=model,
        **spaces,
        **{**settings, **training},
    )


def episode(
    length: int, *, first: int = 0, t_started: int = 0, terminated: bool = True
) -> SingleAgentEpisode:
    """The state after step t is t + 1 in all units, with 100 per episode; observations are random."""
    rng = np.random.default_rng(first)
    after = np.arange(t_started + 1, t_started + length + 1, dtype=np.float32) + first
    state = np.repeat(after[:, None], CELL, 1)
    return SingleAgentEpisode(
        id_=f"episode {first}",
        observations=list(rng.uniform(-1, 1, (length + 1, 2)).astype(np.float32)),
        actions=list(rng.integers(2, size=length)),
        rewards=list(rng.normal(size=length)),
        extra_model_outputs={Columns.STATE_OUT: {"h": state, "c": -state}},
        terminated=terminated,
        t_started=t_started,
        len_lookback_buffer=0,
        observation_space=OBSERVATIONS,
        action_space=gym.spaces.Discrete(2),
    )


def extended(episodes: list[SingleAgentEpisode], num: int = 200, num_steps: int = BURN_IN) -> EpisodeBatch:
    burn_in = BurnIn(
        num_steps,
        {"h": np.zeros(CELL, np.float32), "c": np.full(CELL, 7.0, np.float32)},
        LONGEST - num_steps,
    )
    buffer = EpisodeReplayBuffer(1000, seed=1)
    buffer.add(episodes)
    batch = buffer.sample(batch_size_B=num, **burn_in.options)
    drawn = batch.t_started.copy(), batch.length.copy()
    burn_in.extend(batch, buffer.state_before)
    for one, t_drawn, num_drawn in zip(batch, *drawn, strict=True):
        mask = one.get_extra_model_outputs(Columns.LOSS_MASK)
        expected = min(num_steps, t_drawn - min(e.t_started for e in episodes))
        assert mask.tolist() == [False] * expected + [True] * num_drawn
        assert one.t_started == t_drawn - expected
    return batch


def test_the_burn_in_comes_before_the_drawn_steps_and_begins_with_the_state_before_it() -> None:
    batch = extended([episode(12), episode(9, first=100)])
    assert set(batch.t_started.tolist()) >= {0, 1, 5}
    assert batch.length.max() == LONGEST
    for c, one in enumerate(batch):
        after_first = one.get_extra_model_outputs(Columns.STATE_OUT)["h"][0]
        state = {name: leaf[c] for name, leaf in batch.initial_state.items()}
        if one.t_started == 0:
            assert (state["h"] == 0.0).all()
            assert (state["c"] == 7.0).all()
        else:
            assert (state["h"] == after_first - 1.0).all()
            assert (state["c"] == 1.0 - after_first).all()


@pytest.mark.parametrize("length", [1, 2, BURN_IN, BURN_IN + 1])
def test_every_step_of_an_episode_no_longer_than_the_burn_in_is_trained(length: int) -> None:
    batch = extended([episode(length)])
    trained = {
        one.t_started + int(step)
        for one in batch
        for step in np.flatnonzero(one.get_extra_model_outputs(Columns.LOSS_MASK))
    }
    assert trained == set(range(length))


def test_where_no_step_before_is_stored_sequences_begin_with_a_new_episodes_state() -> None:
    batch = extended([episode(4, t_started=20, terminated=False)])
    at_begin = batch.t_started == 20
    assert at_begin.all()  # the burn-in reaches back to the first stored step
    assert (batch.initial_state["c"] == 7.0).all()


def test_a_part_that_begins_in_mid_episode_begins_with_the_state_that_it_was_recorded_with() -> None:
    burn_in = BurnIn(1, {"h": np.zeros(CELL, np.float32), "c": np.zeros(CELL, np.float32)}, 4)
    whole = EpisodeBatch.from_episodes([episode(40)])
    whole.initial_state = {"h": np.zeros((1, CELL), np.float32), "c": np.zeros((1, CELL), np.float32)}
    buffer = EpisodeReplayBuffer(30, seed=1)
    for begin in range(0, 40, 7):  # a stretch may have a quarter of 30 steps
        buffer.add(whole.slice_steps(begin, min(begin + 7, 40)))
    other = EpisodeReplayBuffer(30)
    other.set_state(buffer.get_state())
    for each in (buffer, other):
        batch = each.sample(batch_size_B=300, **burn_in.options)
        burn_in.extend(batch, each.state_before)
        assert (batch.t_started > 0).all()  # the first part was evicted
        assert batch.length.min() >= 4
        assert (batch.initial_state["h"] == batch.t_started[:, None]).all()
        assert (batch.initial_state["c"] == -batch.t_started[:, None]).all()


def test_sequences_have_the_priorities_of_r2d2() -> None:
    buffer = {"type": "PrioritizedEpisodeReplayBuffer", "capacity": 1000, "alpha": 1.0, "beta": 1.0}
    learner = learner_with_steps(episode(13), episode(9, first=100), replay_buffer_config=buffer, n_step=2)
    batch = drawn(learner)
    columns = learner.prepare(batch).columns["default_policy"]
    outputs = learner.forward_train({"default_policy": columns})["default_policy"]
    noted = {}
    learner.note_td_errors = lambda module_id, batch, errors: noted.update(errors=errors)
    options = {"module_id": "default_policy", "config": learner.config, "batch": columns, "fwd_out": outputs}
    learner.compute_loss_for_module(**options)
    del learner.note_td_errors
    learner.compute_loss_for_module(**options)
    _, priorities = learner._td_errors["default_policy"]
    errors, first = noted["errors"].numpy(), 0
    for c, mask in enumerate(columns[Columns.LOSS_MASK].numpy()):
        mine = errors[first : first + mask.sum()]
        first += mask.sum()
        assert abs(float(priorities[c]) - (0.9 * mine.max() + 0.1 * mine.mean())) < 1e-6
    assert first == len(errors)


@pytest.mark.parametrize("burn_in_len", [0, 2])
def test_a_run_never_begins_a_sequence_in_mid_episode_without_a_state(burn_in_len: int) -> None:
    made: Any = config(burn_in_len=burn_in_len, model={"max_seq_len": 8})
    made.environment("CartPole-v1", observation_space=None, action_space=None)
    made.env_runners(num_env_runners=0, num_envs_per_env_runner=8)
    made.training(replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": 200}, train_batch_size=24)
    made.training(num_steps_sampled_before_learning_starts=200)
    made.reporting(min_sample_timesteps_per_iteration=500, min_time_s_per_iteration=0)
    with made.build() as algo:
        algo.train()
        source = algo.learner_group.foreach_learner(lambda learner: learner)[0].source
        source.batch_size = 2000
        (batch,) = source.batches(1, np.random.default_rng(0))
    is_zero = (batch.initial_state["h"] == 0.0).all(1)
    assert not (is_zero & (batch.t_started > 0)).any()
    assert is_zero.any()
    mask = batch.columns[Columns.LOSS_MASK][batch.step_slots()]
    num_trained = np.bincount(batch.step_chunks()[mask], minlength=len(batch))
    assert num_trained.mean() > 0.9 * (8 - burn_in_len)


def learner_with_steps(*episodes: SingleAgentEpisode, **settings: Any) -> Any:
    learner = config(**settings).build_learner()
    learner.source.add(EpisodeBatch.from_episodes(episodes))
    module = learner.module["default_policy"]
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in module.parameters():  # target networks that differ from the trained ones
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return learner


def drawn(learner: Any, num_steps: int = 60) -> EpisodeBatch:
    learner.source.batch_size = num_steps
    (batch,) = learner.source.batches(1, np.random.default_rng(2))
    return batch  # type: ignore[no-any-return]


def unrolled(one: SingleAgentEpisode, state: Any, encoder: Any, af: Any, vf: Any) -> torch.Tensor:
    """The action values of each observation, step by step."""
    h, c = torch.as_tensor(state["h"])[None], torch.as_tensor(state["c"])[None]
    values = []
    weights = dict(encoder.lstm.named_parameters())
    for obs in one.get_observations():
        token = encoder.tokenizer(torch.as_tensor(obs)[None])
        gates = (
            token @ weights["weight_ih_l0"].T
            + weights["bias_ih_l0"]
            + h @ weights["weight_hh_l0"].T
            + weights["bias_hh_l0"]
        )
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        advantages = af(h)
        values.append(vf(h) + advantages - advantages.mean(-1, keepdim=True))
    return torch.cat(values)


@pytest.mark.parametrize(("double_q", "n_step"), [(True, 1), (False, 1), (True, 3), (False, 20)])
def test_the_loss_is_that_of_lstms_unrolled_by_hand(double_q: bool, n_step: int) -> None:
    learner = learner_with_steps(
        *(episode(13), episode(2, first=100), episode(5, first=200, terminated=False)),
        double_q=double_q,
        n_step=n_step,
    )
    module, batch = learner.module["default_policy"], drawn(learner)
    losses = []
    for c, one in enumerate(batch):
        state = {name: leaf[c] for name, leaf in batch.initial_state.items()}
        with torch.no_grad():
            online = unrolled(one, state, module.encoder, module.af, module.vf)
            target = unrolled(one, state, module._target_encoder, module._target_af, module._target_vf)
        mask = one.get_extra_model_outputs(Columns.LOSS_MASK)
        for t in np.flatnonzero(mask).tolist():
            end = min(t + n_step, len(one))
            best = (online if double_q else target)[end].argmax()
            y = torch.tensor(sum(GAMMA**k * float(one.get_rewards(t + k)) for k in range(end - t)))
            if not (one.is_terminated and end == len(one)):
                y += GAMMA ** (end - t) * target[end, best]
            losses.append(functional.mse_loss(online[t, int(one.get_actions(t))], y))
    train_batch = learner.prepare(batch)
    columns = train_batch.columns["default_policy"]
    assert columns[Columns.OBS].shape == (len(batch), LONGEST, 2)
    assert train_batch.num_env_steps == int(columns[Columns.LOSS_MASK].sum()) == len(losses)
    outputs = learner.forward_train({"default_policy": columns})["default_policy"]
    loss = learner.compute_loss_for_module(
        module_id="default_policy", config=learner.config, batch=columns, fwd_out=outputs
    )
    assert_close(loss.detach(), torch.stack(losses).mean())


def test_distributions_are_trained_on_sequences_too() -> None:
    learner = learner_with_steps(episode(13), num_atoms=5)
    result = learner.update(episodes=[episode(5, first=300)])["default_policy"]
    assert result["num_module_steps_trained"] > 0
    assert np.isfinite(result["qf_loss"])


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            config(replay_buffer_config={"type": OnlyTransitions}),
            "'OnlyTransitions'.*Use 'EpisodeReplayBuffer'",
        ),
        (config(burn_in_len=LONGEST - 1), r"burn_in_len=5: .* max_seq_len=6, .* at most max_seq_len - 2"),
        (config(burn_in_len=0, model={"max_seq_len": 1}), "max_seq_len=1"),
        (config(burn_in_len=0, model={"max_seq_len": 251}), "max_seq_len=251, .* capacity to 1004"),
        (config(model={"use_lstm": False}), "burn_in_len=3: no module has a state"),
    ],
)
def test_settings_that_do_not_fit_stateful_modules_are_refused(made: DQNConfig, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        made.build_learner()


def multi_agent_config(modules: dict[str, bool]) -> Any:
    """DQN with a module for each agent of the same name; True: with an LSTM."""
    made: Any = config()
    made.environment(
        observation_space=gym.spaces.Dict(dict.fromkeys("ab", OBSERVATIONS)),
        action_space=gym.spaces.Dict(dict.fromkeys("ab", gym.spaces.Discrete(2))),
    )
    made.multi_agent(policies=set(modules), policy_mapping_fn=lambda agent_id, episode: agent_id)
    made.rl_module(
        rl_module_spec=MultiRLModuleSpec(
            rl_module_specs={
                module_id: RLModuleSpec(
                    module_class=DefaultDQNModule,
                    observation_space=OBSERVATIONS,
                    action_space=gym.spaces.Discrete(2),
                    model_config={**made.model_config, "use_lstm": use_lstm},
                )
                for module_id, use_lstm in modules.items()
            }
        )
    )
    return made


def multi_agent_episode(length: int, first: int, agents: str = "ab") -> MultiAgentEpisode:
    """Agents that live as `episode` says; agent b's steps are those with 50 more per episode."""
    of_agents = {agent: episode(length, first=first + 50 * (agent == "b")) for agent in agents}

    def steps(get: Any, num: int = length) -> list[dict[str, Any]]:
        return [{agent: get(one, t) for agent, one in of_agents.items()} for t in range(num)]

    return MultiAgentEpisode(
        id_=f"multi-agent {first}",
        agent_to_module_mapping_fn=lambda agent_id, episode: agent_id,
        observation_space=gym.spaces.Dict(dict.fromkeys("ab", OBSERVATIONS)),
        action_space=gym.spaces.Dict(dict.fromkeys("ab", gym.spaces.Discrete(2))),
        observations=steps(SingleAgentEpisode.get_observations, length + 1),
        actions=steps(SingleAgentEpisode.get_actions),
        rewards=steps(SingleAgentEpisode.get_rewards),
        extra_model_outputs=steps(
            lambda one, t: {Columns.STATE_OUT: one.get_extra_model_outputs(Columns.STATE_OUT, t)}
        ),
        terminateds={**dict.fromkeys(of_agents, True), "__all__": True},
        len_lookback_buffer=0,
    )


def test_modules_of_several_agents_get_sequences_from_their_own_agents_steps() -> None:
    """The columns are those that a single-agent run draws from the same steps with the same random numbers."""
    learner: Any = multi_agent_config({"a": True, "b": True}).build_learner()
    learner.source.add([multi_agent_episode(12, 0), multi_agent_episode(2, 100)])
    rng = np.random.default_rng(2)
    learner.source.batch_size = 60
    (batch,) = learner.source.batches(1, rng)
    train_batch = learner.prepare(batch)
    alone: Any = config().build_learner()
    rng = np.random.default_rng(2)
    for agent, offset in (("a", 0), ("b", 50)):
        alone.source = alone.make_source()
        alone.source.batch_size = min(60, len(learner.source.buffer))
        alone.source.add([episode(12, first=offset), episode(2, first=100 + offset)])
        alone.source.buffer._num_items_sampled = 0
        (drawn_alone,) = alone.source.batches(1, rng)
        expected = alone.prepare(drawn_alone)
        columns = train_batch.columns[agent]
        assert columns.keys() == expected.columns["default_policy"].keys()
        for name, column in expected.columns["default_policy"].items():
            assert tree_equal(columns[name], column), name
        assert train_batch.num_module_steps[agent] == expected.num_module_steps["default_policy"]
    assert train_batch.num_env_steps == sum(
        max(int(train_batch.columns[agent][Columns.LOSS_MASK][item].sum()) for agent in "ab")
        for item in range(len(batch))
    )
    learner._learner_connector.time_pieces = True
    generic = learner.prepare(batch)
    for agent in "ab":
        for name, column in train_batch.columns[agent].items():
            assert tree_equal(generic.columns[agent][name], column), name


def tree_equal(one: Any, other: Any) -> bool:
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_modules_with_and_without_state_are_trained_together() -> None:
    learner: Any = multi_agent_config({"a": True, "b": False}).build_learner()
    results = learner.update(episodes=[multi_agent_episode(12, 0)])
    assert all(np.isfinite(results[module_id]["qf_loss"]) for module_id in "ab")
    (batch,) = learner.source.batches(1, np.random.default_rng(0))
    columns = learner.prepare(batch).columns
    assert columns["a"][Columns.OBS].shape == (4, LONGEST, 2)  # 12 steps in sequences of 3 and a burn-in
    assert columns["b"][Columns.OBS].shape == (12, 2)
    buffers = learner.source.buffer.buffers
    assert Columns.STATE_OUT in buffers["a"]._store.columns
    assert Columns.STATE_OUT not in buffers["b"]._store.columns


def test_a_stateful_module_that_is_added_later_gets_sequences() -> None:
    made = multi_agent_config({"a": True, "b": True})
    learner: Any = multi_agent_config({"a": False}).training(burn_in_len=0).build_learner()
    learner.update(episodes=[multi_agent_episode(12, 0, agents="a")])
    learner.add_module(module_id="b", module_spec=made.rl_module_spec.rl_module_specs["b"])
    results = learner.update(episodes=[multi_agent_episode(12, 100)])
    assert learner.source.burn_ins.keys() == {"b"}
    assert results["b"]["num_module_steps_trained"] > 0
    assert Columns.STATE_OUT in learner.source.buffer.buffers["b"]._store.columns
    learner.remove_module("b")
    assert not learner.source.burn_ins


class Corridor(ShortEnv):
    """A cue in the first observation; six steps later the action that it names is worth 1, the other -1."""

    length = 7

    def observation(self) -> Any:
        if not self.t:
            self.cue = int(self.np_random.integers(2))
        return np.array([0 if self.t else 2 * self.cue - 1, self.t == 6], np.float32)

    def reward(self, action: Any) -> float:
        return 0.0 if self.t < 7 else 1.0 if action == self.cue else -1.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_was_seen_six_steps_ago_is_remembered() -> None:
    made: Any = DQNConfig().environment(Corridor).debugging(seed=1)
    made.env_runners(num_env_runners=0, num_envs_per_env_runner=8)
    made.rl_module(
        model_config={"fcnet_hiddens": [32], "use_lstm": True, "lstm_cell_size": 32, "max_seq_len": 8}
    )
    made.training(n_step=3, lr=2e-3, gamma=0.95, epsilon=[(0, 1.0), (6000, 0.05)], train_batch_size=256)
    made.training(target_network_update_freq=200)
    made.reporting(min_sample_timesteps_per_iteration=2000, min_time_s_per_iteration=0)
    with made.build() as algo:
        for _ in range(6):
            result = algo.train()
    assert result["env_runners"]["episode_return_mean"] > 0.6  # without memory 0
