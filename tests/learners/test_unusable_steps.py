"""An update goes without the steps that make its loss overflow, and without no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlzmq.algorithms.appo.appo_config import APPOConfig
from rlzmq.algorithms.appo.appo_learner import APPOLearner
from rlzmq.algorithms.impala.impala_config import IMPALAConfig
from rlzmq.algorithms.impala.impala_learner import IMPALALearner
from rlzmq.algorithms.ppo.ppo_learner import PPOLearner
from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.learner import AddInfosFromEpisodesToTrainBatch
from rlzmq.core.errors import NotFiniteError
from rlzmq.core.tree import tree_leaves, tree_map
from rlzmq.episodes.columns import ORIGIN, Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.multi_agent_batch import MultiAgentEpisodeBatch
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.learners.learner import Learner
from rlzmq.learners.sources import CircularBuffer
from rlzmq.learners.unusable import LeftOut
from rlzmq.modules.multi_rl_module_spec import MultiRLModuleSpec
from rlzmq.modules.spec import RLModuleSpec
from tests.learners.cases import (
    ACTION_SPACE,
    OBSERVATION_SPACE,
    LinearModule,
    SquareLearner,
    episode,
    linear_spec,
    ppo_config,
    ppo_learner,
    square_learner,
)
from tests.learners.ranks import form_group, run_ranks

INFINITE_LOSS, INFINITE_GRADIENT = 9.0, 8.0


class OverflowingLearner(SquareLearner):
    """Its loss is infinite where an input is 9, its gradient where one is 8; it draws, and keeps what it sees."""

    def compute_loss_for_module(self, *, batch: Any, fwd_out: Any, **kwargs: Any) -> Tensor:
        torch.rand(1)
        self.metrics.log_value("calls", 1, reduce="sum")
        loss = super().compute_loss_for_module(batch=batch, fwd_out=fwd_out, **kwargs)
        if bool((batch["obs"] == INFINITE_LOSS).any()):
            return loss * float("inf")
        return loss + torch.sqrt(loss * 0.0) if bool((batch["obs"] == INFINITE_GRADIENT).any()) else loss


class BufferedLearner(OverflowingLearner):
    def make_source(self) -> CircularBuffer:
        return CircularBuffer(4, 3)


def observing(*values: float, id_: str = "e") -> SingleAgentEpisode:
    """An episode with a step for each value."""
    made = SingleAgentEpisode(id_=id_)
    made.add_env_reset(np.full(4, values[0], np.float32))
    for value in (*values[1:], 0.0):
        made.add_env_step(np.full(4, value, np.float32), 0, 1.0)
    return made


def fragment(*values: float, seq: int = 0, rank: int = 0) -> EpisodeBatch:
    batch = EpisodeBatch.from_episodes([observing(*values, id_=f"e{seq}")])
    batch.meta[ORIGIN] = (f"runner-{rank}", 1, seq, 100)
    return batch


def state_of(learner: Learner) -> Any:
    state = learner.get_state(["rl_module", "optimizer", "weights_seq_no", "counters"])
    return {name: np.asarray(value).tobytes() for name, value in _flat(state)}


def _flat(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict):
        return [item for key, value in tree.items() for item in _flat(value, f"{path}/{key}")]
    if isinstance(tree, list):
        return [item for key, value in enumerate(tree) for item in _flat(value, f"{path}/{key}")]
    return [(path, tree)]


@pytest.mark.parametrize("minibatch_size", [None, 3, 32])
@pytest.mark.parametrize("bad", [INFINITE_LOSS, INFINITE_GRADIENT])
def test_an_update_trains_all_but_the_steps_that_make_the_loss_overflow(
    bad: float, minibatch_size: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    learner, other = (
        square_learner(learner_class=OverflowingLearner, minibatch_size=minibatch_size) for _ in range(2)
    )
    results = learner.update(
        episodes=[fragment(1, 2), fragment(3, bad, 4, seq=1), fragment(5, 6, bad, bad, seq=2)]
    )
    assert learner.was_trained
    assert learner.left_out == [
        LeftOut(("runner-0", 1, 1, 100), 1, 1, is_fresh=True),
        LeftOut(("runner-0", 1, 2, 100), 2, 1, is_fresh=True),
        LeftOut(("runner-0", 1, 2, 100), 3, 1, is_fresh=True),
    ]
    assert results["__all_modules__"]["num_env_steps_trained"] == 6
    assert results["__all_modules__"]["num_nonfinite_gradients_skipped"] > 0
    assert np.isfinite(results["default_policy"]["total_loss"])
    assert (
        "1 env step from step 1 of episode e1 (env -1, fragment runner-0/1/1), 1 env step from step 2"
        in caplog.text
    )
    other.update(episodes=[fragment(1, 2), fragment(3), fragment(4), fragment(5, 6)])
    assert other.left_out == []
    assert state_of(learner) == state_of(other)
    assert learner.metrics.peek("calls") == other.metrics.peek("calls")


def test_the_next_update_knows_nothing_of_it() -> None:
    learner = square_learner(learner_class=OverflowingLearner)
    learner.update(episodes=[fragment(1, 2), fragment(9, 3)])
    assert learner.left_out
    learner.update(episodes=[fragment(1, 2)])
    assert learner.left_out == []


def test_hand_made_episodes_are_cut_too() -> None:
    learner = square_learner(learner_class=OverflowingLearner)
    assert (
        learner.update(episodes=[observing(1, 2, 9), observing(3)])["__all_modules__"][
            "num_env_steps_trained"
        ]
        == 3
    )
    assert learner.left_out == [LeftOut(None, 2, 1, is_fresh=True)]


class OverflowsTogether(SquareLearner):
    """Sixteen times 1e30 is too much for a square of its sum; each alone is not."""

    def compute_loss_for_module(self, *, batch: Any, fwd_out: Any, **kwargs: Any) -> Tensor:
        loss = super().compute_loss_for_module(batch=batch, fwd_out=fwd_out, **kwargs)
        return loss * 0.0 + (batch["rewards"].sum() / 8.0).square()


def test_what_only_overflows_together_is_left_out_together() -> None:
    learner = square_learner(learner_class=OverflowsTogether, minibatch_size=None)
    loud = episode(4, id_="loud")
    loud.rewards.data[:] = [5e19, 5e19, 5e19, 5e19]
    learner.update(episodes=[EpisodeBatch.from_episodes([episode(20), loud, episode(8, seed=1)])])
    assert learner.was_trained
    (left,) = {(item.first, item.num_steps) for item in learner.left_out}
    assert left[0] <= 20
    assert left[0] + left[1] >= 24
    assert left[1] <= 16


@pytest.mark.parametrize("values", [[(9, 9), (9,)], [(9, 9, 1)]])
def test_where_most_data_are_unusable_it_is_not_the_data(values: Any) -> None:
    learner = square_learner(learner_class=OverflowingLearner)
    before = state_of(learner)
    results = learner.update(episodes=[fragment(*one) for one in values])
    assert not learner.was_trained
    assert learner.left_out == []
    assert results["__all_modules__"]["num_env_steps_trained"] == 0
    after = state_of(learner)
    changed = {name for name in after if before.get(name) != after[name]}
    assert changed == {"/weights_seq_no", "/counters/num_gradient_updates_lifetime"}


class NormedModule(LinearModule):
    """With statistics of what it has seen."""

    def setup(self) -> None:
        super().setup()
        self.norm = torch.nn.BatchNorm1d(4)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return super()._forward({Columns.OBS: self.norm(batch[Columns.OBS])})


@pytest.mark.parametrize("good", [[], [1, 2, 3, 4]])
def test_statistics_of_a_module_forget_what_its_loss_could_not_use(good: list[float]) -> None:
    spec = RLModuleSpec(
        module_class=NormedModule, observation_space=OBSERVATION_SPACE, action_space=ACTION_SPACE
    )
    learner = OverflowingLearner(config=ppo_config(), module_spec=spec)
    learner.build()
    # inputs without a batch to search through
    rows = torch.tensor([*([[float(value)] * 4 for value in good]), [1e38] * 4, [-1e38] * 4])
    learner.update(batch={Columns.OBS: rows})
    statistics = learner.module["default_policy"].norm
    assert bool(torch.isfinite(statistics.running_var).all())
    assert bool(torch.isfinite(statistics.running_mean).all())


def test_an_env_step_of_several_agents_is_left_out_as_a_whole() -> None:
    made = MultiAgentEpisode(agent_to_module_mapping_fn=lambda agent_id, _: f"of_{agent_id}")
    made.add_env_reset(observations={agent: np.ones(4, np.float32) for agent in "ab"})
    for t in range(5):
        made.add_env_step(
            {agent: np.full(4, 9 if (agent, t) == ("b", 2) else 1, np.float32) for agent in "ab"},
            dict.fromkeys("ab", 0),
            dict.fromkeys("ab", 1.0),
        )
    config = ppo_config().multi_agent(
        policies=["of_a", "of_b"], policy_mapping_fn=lambda agent_id, *_, **__: f"of_{agent_id}"
    )
    spec = MultiRLModuleSpec(rl_module_specs={f"of_{agent}": linear_spec() for agent in "ab"})
    learner = OverflowingLearner(config=config, module_spec=spec)
    learner.build()
    results = learner.update(episodes=[MultiAgentEpisodeBatch.from_episodes([made])])
    assert [(item.first, item.num_steps) for item in learner.left_out] == [(3, 1)]
    assert results["of_a"]["num_module_steps_trained"] == results["of_b"]["num_module_steps_trained"] == 4


# -- several ranks ------------------------------------------------------------------------------------


def _train_together(rank: int, world_size: int, path: Path, bad_rank: int) -> Any:
    learner = square_learner(learner_class=OverflowingLearner, minibatch_size=4)
    learner.group = form_group(path, rank, world_size)
    learner.rank, learner.num_ranks = rank, world_size
    values = [1.0 + rank, 2.0, 3.0, 4.0, 5.0, 6.0]
    if rank == bad_rank:
        values[2] = INFINITE_LOSS
    outcomes = []
    for update in range(3):
        learner.update(episodes=[fragment(*values, seq=update, rank=rank), fragment(7, 7, seq=9, rank=rank)])
        outcomes.append((learner.was_trained, learner.left_out, learner.num_env_steps_of_all_ranks_lifetime))
    digest = learner.parameter_hash()
    learner.leave_distributed()
    return outcomes, digest


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_all_ranks_go_without_what_one_of_them_found(bad_rank: int, tmp_path: Path) -> None:
    (first, digest), (second, other_digest) = run_ranks(_train_together, 2, tmp_path, bad_rank)
    assert digest == other_digest
    assert first == second
    assert [outcome[0] for outcome in first] == [True] * 3
    assert [outcome[2] for outcome in first] == [15, 30, 45]
    for update, (_, left_out, _) in enumerate(first):
        assert left_out == [LeftOut([f"runner-{bad_rank}", 1, update, 100], 2, 1, is_fresh=True)]


# -- data that are trained more than once ----------------------------------------------------------------


def test_what_lies_in_a_buffer_is_found_there_and_taken_out() -> None:
    learner = square_learner(learner_class=BufferedLearner, minibatch_size=None, num_epochs=1)
    source: Any = learner.source
    for seq in range(4):
        learner.update(episodes=[fragment(1, 2, seq=seq)])
    held = next(batch for batch, uses in reversed(source._slots) if uses)
    # Usable when it came: here the weights have not changed, so it is written in afterwards.
    held[0].columns["obs"][held[0].start[0]] = INFINITE_LOSS
    found = []
    for seq in range(4, 12):
        learner.update(episodes=[fragment(1, 2, seq=seq)])
        assert learner.was_trained
        found += learner.left_out
    assert len(found) == 1
    assert (found[0].origin, found[0].first, found[0].num_steps) == (held[0].meta[ORIGIN], 0, 1)
    assert not found[0].is_fresh


def test_a_fresh_fragment_is_clean_when_it_goes_into_the_buffer() -> None:
    learner = square_learner(learner_class=BufferedLearner, minibatch_size=None, num_epochs=1)
    found = []
    for seq in range(12):
        learner.update(
            episodes=[fragment(*((9, 2) if seq == 3 else (1, 2)), seq=seq), fragment(3, 4, seq=100)]
        )
        assert learner.was_trained
        found += [(item.origin[2], item.first, item.num_steps) for item in learner.left_out]
    assert found == [(3, 0, 1)]


def test_what_was_found_stays_out_of_the_buffer_when_the_update_is_undone_later() -> None:
    """Of an update that fails the buffer is put back: the next attempt finds the same again, and accounts for it."""

    class Fails(BufferedLearner):
        fails = False

        def after_gradient_based_update(self, **kwargs: Any) -> None:
            super().after_gradient_based_update(**kwargs)
            if self.fails:
                raise OSError("on its way")

    learner: Any = square_learner(learner_class=Fails, minibatch_size=None, num_epochs=1)
    learner.update(episodes=[fragment(1, 2)])
    held = learner.source._slots[0][0]
    held[0].columns["obs"][held[0].start[0]] = INFINITE_LOSS
    before = state_of(learner)
    learner.fails = True
    for _ in range(2):
        found = []
        with pytest.raises(OSError, match="on its way"):
            learner.update(episodes=[fragment(1, 2, 3, 4, seq=1)])
        found.append([item.origin for item in learner.left_out])
        assert state_of(learner) == before
        assert learner.source._slots[0][0] is held
    assert found[0] == found[-1]


# -- what the loss of an algorithm reads ------------------------------------------------------------------


class ReadsInfos(PPOLearner):
    def compute_loss_for_module(self, *, batch: Any, **kwargs: Any) -> Tensor:
        weights = torch.tensor([float(info["weight"]) for info in batch[Columns.INFOS]])
        return super().compute_loss_for_module(batch=batch, **kwargs) * weights.mean()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_info_that_the_loss_cannot_use_costs_its_step(value: float) -> None:
    config = ppo_config().training(learner_connector=lambda *_: AddInfosFromEpisodesToTrainBatch())
    spec = RLModuleSpec(observation_space=OBSERVATION_SPACE, action_space=ACTION_SPACE)
    learner = ReadsInfos(config=config, module_spec=spec)
    learner.build()
    made = episode(40)
    for t in range(41):
        made.infos.data[t] = {"weight": value if t == 5 else 1.0}
    results = learner.update(episodes=[EpisodeBatch.from_episodes([made])])
    assert [(item.first, item.num_steps) for item in learner.left_out] == [(5, 1)]
    assert results["__all_modules__"]["num_env_steps_trained"] == 39


SPOILT = {
    "a reward that overflows squared with others": (Columns.REWARDS, 1.8e19),
    "an observation": (Columns.OBS, 1.8e19),
    "a log-probability that makes a ratio infinite": (Columns.ACTION_LOGP, -500.0),
    "a log-probability that makes it 0": (Columns.ACTION_LOGP, 500.0),
    "a reward beyond float32": (Columns.REWARDS, 1e300),
    "logits": (Columns.ACTION_DIST_INPUTS, 1.8e19),
    "logits of minus infinity": (Columns.ACTION_DIST_INPUTS, -np.inf),
}


@pytest.mark.parametrize("name", SPOILT)
def test_ppo_survives_absurd_numbers(name: str) -> None:
    column, value = SPOILT[name]
    learner = ppo_learner(ppo_config(use_kl_loss=True, vf_clip_param=None, minibatch_size=16))
    for update in range(4):
        batch = EpisodeBatch.from_episodes([episode(30, seed=update), episode(30, seed=50 + update)])
        if update == 1:
            batch.columns[column][batch.start[1] + 7] = value
        results = learner.update(episodes=[batch])
        assert learner.was_trained
        assert sum(item.num_steps for item in learner.left_out) <= 1
        if update != 1:
            assert learner.left_out == []
        trained = results["__all_modules__"]["num_env_steps_trained"]
        assert trained + sum(item.num_steps for item in learner.left_out) == 60
    assert all(np.isfinite(value).all() for value in learner.module["default_policy"].get_state().values())


@pytest.mark.parametrize("reward", [3e38, -3e38, 1e300])
@pytest.mark.parametrize(
    ("config_class", "learner_class"), [(IMPALAConfig, IMPALALearner), (APPOConfig, APPOLearner)]
)
def test_vtrace_survives_absurd_rewards(config_class: Any, learner_class: Any, reward: float) -> None:
    config = config_class().environment(observation_space=OBSERVATION_SPACE, action_space=ACTION_SPACE)
    config.rl_module(model_config={"fcnet_hiddens": [8]}).debugging(seed=1)
    learner = learner_class(config=config, module_spec=config.get_multi_rl_module_spec())
    learner.build()
    left_out = []
    for update in range(8):
        batch = EpisodeBatch.from_episodes([episode(20, seed=update), episode(20, seed=50 + update)])
        batch.meta[ORIGIN] = ("runner", 1, update, 0)
        if update == 1:
            batch.columns[Columns.REWARDS][batch.start[1] + 7] = reward
        learner.update(episodes=[batch])
        assert learner.was_trained
        left_out += [(item.origin[2], item.first, item.num_steps) for item in learner.left_out]
    assert left_out == [(1, 27, 1)], "once, and not those whose targets it spoils"
    assert all(np.isfinite(leaf).all() for leaf in tree_leaves(learner.module["default_policy"].get_state()))


@pytest.mark.parametrize("where", ["initial_state", "state_out"])
def test_a_recurrent_state_that_is_nan_costs_the_step_that_starts_from_it(where: str) -> None:
    model = {"fcnet_hiddens": [8], "use_lstm": True, "lstm_cell_size": 6, "max_seq_len": 5}
    learner = ppo_learner(ppo_config(model, minibatch_size=None))
    initial = learner.module["default_policy"].get_initial_state()

    def zeros(num: int) -> Any:
        return tree_map(lambda leaf: np.zeros((num, *np.shape(leaf)), np.float32), initial)

    for update in range(3):
        batch = EpisodeBatch.from_episodes([episode(20, seed=update), episode(20, seed=50 + update)])
        batch.columns[Columns.STATE_OUT] = zeros(len(batch.columns[Columns.REWARDS]))
        batch.initial_state = zeros(2)
        if update == 1 and where == "initial_state":
            tree_leaves(batch.initial_state)[0][1] = np.nan
        elif update == 1:
            tree_leaves(batch.columns[Columns.STATE_OUT])[0][batch.start[1] + 4] = np.nan
        learner.update(episodes=[batch])
        assert learner.was_trained
        first = 20 if where == "initial_state" else 25
        expected = [(first, 1)] if update == 1 else []
        assert [(item.first, item.num_steps) for item in learner.left_out] == expected
    assert all(np.isfinite(leaf).all() for leaf in tree_leaves(learner.module["default_policy"].get_state()))


class SpoilsObservations(ConnectorV2):
    """Makes NaN of observations of at least `limit`."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def __call__(self, *, batch: dict[str, Any], episodes: Any, **kwargs: Any) -> dict[str, Any]:
        for one in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            seen = np.array(one.get_observations(slice(0, len(one))), np.float32)
            seen[seen >= self.limit] = np.nan
            self.add_n_batch_items(batch, Columns.OBS, list(seen), len(one), one)
        return batch


def _spoilt_learner(limit: float) -> Learner:
    config = ppo_config(learner_connector=lambda *_: SpoilsObservations(limit), minibatch_size=None)
    learner = SquareLearner(config=config, module_spec=linear_spec())
    learner.build()
    return learner


def test_steps_that_a_connector_spoils_are_left_out() -> None:
    learner = _spoilt_learner(7.0)
    for _ in range(3):
        learner.update(episodes=[fragment(1, 2, 3), fragment(4, 7, 5, seq=1)])
        assert learner.was_trained
        assert learner.left_out == [LeftOut(("runner-0", 1, 1, 100), 1, 1, is_fresh=True)]
    assert np.isfinite(
        np.concatenate([np.ravel(leaf) for _, leaf in _flat(learner.module.get_state())])
    ).all()


def test_a_connector_that_spoils_everything_ends_the_run_untrained() -> None:
    learner = _spoilt_learner(-1.0)
    before = learner.parameter_hash()
    for _ in range(9):
        learner.update(episodes=[fragment(1, 2, 3)])
        assert not learner.was_trained
        assert learner.left_out == []
    with pytest.raises(NotFiniteError, match="10 updates in a row took no optimizer step"):
        learner.update(episodes=[fragment(1, 2, 3)])
    assert learner.parameter_hash() == before
