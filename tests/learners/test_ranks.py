"""Learners as ranks of a group, in real processes: equality, agreement, failures within an update, the group itself."""

from __future__ import annotations

import gc
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, no_grad

from rlzmq.algorithms.results import LearnerResults
from rlzmq.core.errors import PeerLostError
from rlzmq.core.metrics import StageTimers
from rlzmq.core.process import loopback_interface
from rlzmq.learners.distributed import DesynchronizedError, RankGroup
from rlzmq.learners.ranks import COMPARE_EVERY_UPDATES
from rlzmq.learners.replay_learner import EpisodeReplay
from rlzmq.learners.snapshot import parameter_hash
from rlzmq.replay import EpisodeReplayBuffer
from rlzmq.wire.payloads import pack_blob, unpack_blob
from tests.learners.cases import (
    LinearModule,
    SquareLearner,
    episode_batch,
    ppo_config,
    ppo_learner,
    rows,
    square_learner,
)
from tests.learners.ranks import form_group, join, run_ranks, without_memory


class ReplayingLearner(SquareLearner):
    def make_source(self) -> EpisodeReplay:
        return EpisodeReplay(EpisodeReplayBuffer(400, seed=0), batch_size=16, train_ratio=2.0)


def replaying_main(rank: int, world_size: int, path: Path) -> Any:
    """Rank 1 is another process's after three updates: with an empty buffer."""
    learner = square_learner(learner_class=ReplayingLearner, minibatch_size=None, num_epochs=1)
    join(learner, path, rank, world_size)
    for update in range(3):
        learner.update(episodes=episode_batch(*[10] * (update + rank + 1)))
    learner.ranks.leave()
    if rank == 1:
        learner = square_learner(learner_class=ReplayingLearner, minibatch_size=None, num_epochs=1)
    join(learner, path, rank, world_size, generation=1)
    learner.ranks.adopt_newest_state()
    held = [learner.source.num_env_steps]
    gave = learner.update(episodes=[] if rank == 1 else episode_batch(20))["__all_modules__"]
    held.append(learner.source.num_env_steps)
    learner.update(episodes=episode_batch(20, 20))
    return learner.ranks.agree(), learner.weights_seq_no, held, gave, learner.source.progress.get_state()


def test_a_rank_that_joins_has_an_empty_buffer_and_the_groups_count(tmp_path: Path) -> None:
    (agree, version, held, gave, ratio), newcomer = run_ranks(replaying_main, 2, tmp_path)
    assert agree
    assert newcomer[0]
    assert version == newcomer[1] == 5
    assert held == [60, 80]
    assert newcomer[2] == [0, 0]
    assert gave["num_env_steps_trained"] == 16 * gave["num_gradient_updates"] > 0
    assert newcomer[3]["num_env_steps_trained"] == 0
    assert newcomer[3]["num_gradient_updates"] == gave["num_gradient_updates"]
    # 10 + 20, 20 + 30, 30 + 40, then 20 + 0 and 40 + 40 fresh steps
    assert ratio == newcomer[4] == {"num_sampled": 250, "num_trained": 480}


def diverging_main(rank: int, world_size: int, path: Path) -> Any:
    learner = ppo_learner(ppo_config(minibatch_size=None, num_epochs=1))
    join(learner, path, rank, world_size)
    learner.weights_seq_no = COMPARE_EVERY_UPDATES - 2
    learner.update(episodes=episode_batch(40, 24))
    if rank == 1:  # a bit flips
        with no_grad():
            next(learner.module["default_policy"].parameters()).view(-1)[0] += 1.0
    agreed = learner.ranks.agree()
    learner.update(episodes=episode_batch(40, 24))
    return agreed, learner.ranks.num_divergences, learner.ranks.agree(), learner.weights_seq_no


def test_ranks_that_have_come_to_differ_are_found_and_made_equal(tmp_path: Path) -> None:
    assert run_ranks(diverging_main, 2, tmp_path) == [(False, 1, True, COMPARE_EVERY_UPDATES)] * 2


class NormalizingModule(LinearModule):
    def setup(self) -> None:
        super().setup()
        self.layer = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))  # type: ignore[assignment]


def normalizing_main(rank: int, world_size: int, path: Path, shares_memory: bool) -> Any:
    if not shares_memory:
        RankGroup.share_rows = without_memory  # type: ignore[method-assign]
    learner = square_learner(module_class=NormalizingModule, minibatch_size=None, num_epochs=1)
    join(learner, path, rank, world_size)
    learner.weights_seq_no = COMPARE_EVERY_UPDATES - 3
    means = []
    for turn in range(4):  # update 98 to 101
        learner.update(batch=rows(16, seed=10 * turn + rank))
        means.append(learner.module["default_policy"].layer[0].running_mean.tolist())  # type: ignore[attr-defined]
    return learner.ranks.num_divergences, learner.ranks.agree(), means


@pytest.mark.parametrize("shares_memory", [True, False])
def test_the_statistics_of_batch_norm_are_those_of_rank_0(tmp_path: Path, shares_memory: bool) -> None:
    zero, one = run_ranks(normalizing_main, 2, tmp_path, shares_memory)
    assert zero == one
    assert zero[:2] == (0, True)
    expected = np.zeros(4)
    for turn, means in enumerate(zero[2]):
        expected = 0.9 * expected + 0.1 * rows(16, seed=10 * turn)["obs"].mean(0).numpy()
        assert means == pytest.approx(expected, abs=1e-6)


class NaNOnRankOne(SquareLearner):
    num_calls = 0

    def compute_loss_for_module(self, *, module_id: str, **kwargs: Any) -> Tensor:
        self.num_calls += 1
        if module_id == "a":
            self.metrics.log_value(("a", "calls"), 1, reduce="sum")
            self.metrics.log_value(("a", "all_calls"), 1, reduce="lifetime_sum")
            self.metrics.log_value(("a", "highest_rank"), self.rank, reduce="max")
        loss = super().compute_loss_for_module(module_id=module_id, **kwargs)
        return loss * float("nan") if self.rank == 1 and module_id == "a" and self.num_calls == 1 else loss


def uneven_main(rank: int, world_size: int, path: Path) -> Any:
    learner = square_learner("a", "b", "c", learner_class=NaNOnRankOne, minibatch_size=4, num_epochs=1)
    join(learner, path, rank, world_size)
    # rank 0 has more rows, rank 1 has no data of "b", nobody has data of "c"
    batch = {"a": rows(20), "b": rows(6)} if rank == 0 else {"a": rows(8)}
    before = learner.module["c"].get_state()
    results = learner.update(batch=batch)
    steps_of_b = {int(state["step"]) for state in learner.get_optimizer("b").state.values()}
    empty = learner.update(batch={"a": rows(4)}) if rank == 0 else learner.update(episodes=[])
    untouched = all(
        np.array_equal(value, before[name]) for name, value in learner.module["c"].get_state().items()
    )
    answer = (
        learner.ranks.agree(),
        untouched,
        steps_of_b,
        results["__all_modules__"]["num_gradient_updates"],
        empty["__all_modules__"]["num_gradient_updates"],
        results["a"]["num_nonfinite_gradients_skipped"],
        results["__all_modules__"]["num_env_steps_trained"],
    )
    return answer, unpack_blob(pack_blob([results, empty]))


def test_ranks_with_different_data_take_equally_many_steps_and_stay_equal(tmp_path: Path) -> None:
    (first, first_results), (second, second_results) = run_ranks(uneven_main, 2, tmp_path)
    assert first == (True, True, {2}, 5, 1, 1, 20)
    assert second == (True, True, {2}, 5, 1, 1, 8)
    results = LearnerResults(StageTimers())  # as the run's driver has it
    merged_results = []
    for of_ranks in zip(second_results, first_results, strict=True):
        results.add(of_ranks)
        merged_results.append(results.reduce()[0])
    one, two = merged_results
    names = ("num_module_steps_trained", "num_module_steps_trained_lifetime")
    steps = {
        m: [tuple(merged[m][n] for n in names) for merged in (one, two)] for m in ("a", "__all_modules__")
    }
    assert steps == {"a": [(28, 28), (4, 32)], "__all_modules__": [(34, 34), (4, 38)]}
    assert "num_module_steps_trained" not in second_results[0].get("b", {})
    assert (one["b"]["num_module_steps_trained"], one["b"]["num_module_steps_trained_lifetime"]) == (6, 6)
    logged = [[merged["a"][n] for n in ("calls", "all_calls", "highest_rank")] for merged in (one, two)]
    assert logged == [[10, 10, 1], [1, 11, 0]]


def scheduled_main(rank: int, world_size: int, path: Path) -> Any:
    learner = ppo_learner(ppo_config(lr=[[0, 1e-2], [1000, 0.0]]))
    join(learner, path, rank, world_size)
    episodes = episode_batch(40) if rank == 0 else episode_batch(24)
    rates = [
        learner.update(episodes=episodes)["default_policy"]["default_optimizer_learning_rate"] for _ in "123"
    ]
    return rates, learner.get_state(["counters"])["counters"]


def test_schedules_follow_the_env_steps_of_all_ranks(tmp_path: Path) -> None:
    one, other = run_ranks(scheduled_main, 2, tmp_path)
    rates, counters = one
    np.testing.assert_allclose(rates, [1e-2 * (1 - steps / 1000) for steps in (0, 64, 128)])
    assert other[0] == rates
    assert counters["num_env_steps_of_all_ranks_lifetime"] == 192
    assert (counters["num_env_steps_trained_lifetime"], other[1]["num_env_steps_trained_lifetime"]) == (
        120,
        72,
    )
    learner = ppo_learner(ppo_config(lr=[[0, 1e-2], [1000, 0.0]]))
    learner.set_state({"counters": counters})  # alone from here on
    results = learner.update(episodes=episode_batch(40))
    np.testing.assert_allclose(
        results["default_policy"]["default_optimizer_learning_rate"], 1e-2 * (1 - 0.192)
    )


def weighted_main(rank: int, world_size: int, path: Path) -> Any:
    learner = square_learner(minibatch_size=None, num_epochs=1)
    join(learner, path, rank, world_size)
    data = rows(12)
    part = {name: column[:9] if rank == 0 else column[9:] for name, column in data.items()}
    return learner.update(batch=part)["default_policy"]["gradients_default_optimizer_global_norm"]


def test_gradients_are_the_mean_over_all_rows_however_they_are_shared_out(tmp_path: Path) -> None:
    alone = square_learner(minibatch_size=None, num_epochs=1)
    norm = alone.update(batch=rows(12))["default_policy"]["gradients_default_optimizer_global_norm"]
    assert run_ranks(weighted_main, 2, tmp_path) == pytest.approx([norm, norm], rel=1e-5)


class FailingLearner(SquareLearner):
    """Rank 1 has a bug that shows at its third minibatch."""

    num_calls = 0

    def compute_loss_for_module(self, **kwargs: Any) -> Tensor:
        self.num_calls += 1
        if self.rank == 1 and self.num_calls == 3:
            raise ZeroDivisionError("a bug in a loss")
        return super().compute_loss_for_module(**kwargs)


def failing_main(rank: int, world_size: int, path: Path) -> Any:
    learner = square_learner(learner_class=FailingLearner, minibatch_size=4, num_epochs=1)
    join(learner, path, rank, world_size)
    before = learner.parameter_hash()
    gc.disable()  # the peers are told by what the learner does, not by a collection that happens to come
    start = time.perf_counter()
    with pytest.raises(ZeroDivisionError if rank == 1 else PeerLostError) as caught:
        learner.update(batch=rows(20))
    seconds = time.perf_counter() - start
    # Rank 1 lives until rank 0 has seen the failure: it is not its death that is noticed.
    events = dist.FileStore(str(path / "events"), world_size)
    if rank == 0:
        events.set("seen", "")
    else:
        events.wait(["seen"], timedelta(seconds=40))
    learner.ranks.leave()
    assert caught.traceback  # refers to the frames of the failed update all the while
    return learner.parameter_hash() == before, seconds


def test_an_error_in_one_ranks_loss_reaches_the_others_at_once(tmp_path: Path) -> None:
    for undone, seconds in run_ranks(failing_main, 2, tmp_path):
        assert undone
        assert seconds < 15.0  # the group's timeout is 30 s


def test_several_ranks_need_a_store() -> None:
    with pytest.raises(ValueError, match="2 ranks need a store"):
        square_learner().ranks.join(rank=0, world_size=2)


# -- the group itself ----------------------------------------------------------------------------------


def collectives_main(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    group = form_group(path, rank, world_size, generation=3)
    results: dict[str, Any] = {
        "integers": group.gather([rank, 2**62 + rank]).tolist(),
        "floats": group.gather([0.1 * rank, float("inf")], step=[7]).tolist(),
        "many": group.gather([rank] * 600).sum(),
        "bytes": group.broadcast_bytes(b"weights" if rank == 1 else None, 1),
        "empty": group.broadcast_bytes(b"" if rank == 0 else None, 0),
        "all bytes": group.gather_bytes(b"ab" * rank),
    }
    with pytest.raises(DesynchronizedError, match=f"rank {rank} of generation 3: .* all 2 ranks"):
        group.gather([1], step=[7 + rank])
    with pytest.raises(DesynchronizedError):
        group.gather([1] * (rank + 1))
    group.close()
    group.close()
    results["destroyed"] = not dist.is_initialized()
    return results


def test_ranks_exchange_numbers_and_bytes_at_the_same_step_only(tmp_path: Path) -> None:
    for results in run_ranks(collectives_main, 2, tmp_path):
        assert results == {
            "integers": [[0, 2**62], [1, 2**62 + 1]],
            "floats": [[0.0, float("inf")], [0.1, float("inf")]],
            "many": 600,
            "bytes": b"weights",
            "empty": b"",
            "all bytes": [b"", b"ab"],
            "destroyed": True,
        }


def past_main(rank: int, world_size: int, path: Path) -> list[list[int]]:
    if rank == 0:  # it has been through three attempts that failed in three ways, the others through none
        store = dist.FileStore(str(path / "nobody"), world_size)
        with pytest.raises(PeerLostError, match="rank 1 did not arrive"):
            RankGroup(rank=0, world_size=2, store=store, timeout_s=0.1, interface=loopback_interface())
        with pytest.raises(PeerLostError, match="generation 1 was called off"):
            RankGroup(rank=0, world_size=2, store=store, generation=1, is_called_off=lambda: True)
        store.set("rlzmq/generation_2/here/1", "1")  # it came, and died before it connected
        with pytest.raises(PeerLostError, match="forming the group failed"):
            RankGroup(
                rank=0,
                world_size=2,
                store=store,
                generation=2,
                forming_timeout_s=0.2,
                interface=loopback_interface(),
            )
    group = form_group(path, rank, world_size, generation=3)
    gathered: list[list[int]] = group.gather([rank]).tolist()
    group.close()
    return gathered


def test_ranks_come_together_whatever_their_former_attempts_were(tmp_path: Path) -> None:
    assert run_ranks(past_main, 2, tmp_path) == [[[0], [1]]] * 2


def test_a_wrong_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size=2, got 2"):
        RankGroup(rank=2, world_size=2, store=dist.HashStore())


def test_the_parameter_hash_sees_every_bit_name_and_shape() -> None:
    state = {"w": torch.tensor([1.0, 2.0]), "b": torch.zeros(())}
    same = {"b": torch.zeros(()), "w": torch.tensor([1.0, 2.0])}
    assert parameter_hash(state) == parameter_hash(same)
    flipped = state["w"].clone()
    flipped.view(torch.int32)[0] ^= 1
    others = [state | {"w": flipped}, state | {"w": state["w"][None]}, {"v": state["w"], "b": state["b"]}]
    assert len({parameter_hash(other) for other in [state, *others]}) == 4
