"""Groups of real processes: collectives, votes, death of a peer, re-forming, averaged gradients."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rlzmq.core.errors import PeerLostError
from rlzmq.core.process import loopback_interface
from rlzmq.learners.data_parallel import DataParallelForward
from rlzmq.learners.distributed import DesynchronizedError, RankGroup, parameter_hash
from tests.learners.ranks import DiedError, form_group, run_ranks


def collectives_main(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    group = form_group(path, rank, world_size, generation=3)
    results: dict[str, Any] = {
        "sum": group.all_reduce(torch.tensor([rank + 1.0])).tolist(),
        "bytes": group.broadcast_bytes(b"weights" if rank == 1 else None, 1),
        "empty": group.broadcast_bytes(b"" if rank == 0 else None, 0),
        "vote": group.vote([True, rank == 0, True], step_id=7),
        "agree": group.agree("ab" * 32),
        "disagree": group.agree(("ab" if rank else "cd") * 32),
        "last digit": group.agree("a" * 59 + str(rank)),
    }
    try:
        group.vote([True], step_id=7 + rank, num_skipped=1)
    except DesynchronizedError as error:
        results["mismatch"] = str(error)
    group.close()
    group.close()
    results["destroyed"] = not dist.is_initialized()
    return results


def test_collectives_votes_and_hash_comparison(tmp_path: Path) -> None:
    for rank, results in enumerate(run_ranks(collectives_main, 2, tmp_path)):
        mismatch = results.pop("mismatch")
        assert (
            f"rank {rank}: expected all 2 ranks at step {7 + rank} of generation 3 with 1 steps" in mismatch
        )
        assert "steps 7…8 of generations 3…3 with 1…1 skipped" in mismatch
        assert results == {
            "sum": [3.0],
            "bytes": b"weights",
            "empty": b"",
            "vote": [True, False, True],
            "agree": True,
            "disagree": False,
            "last digit": False,
            "destroyed": True,
        }


def death_main(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    group = form_group(path, rank, world_size)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.perf_counter()
    with pytest.raises(PeerLostError, match="learner rank 0 of 2, generation 0: vote") as caught:
        group.vote([True], step_id=0)
    seconds = time.perf_counter() - start
    group.close()
    alone = form_group(path, 0, 1, generation=1)
    verdict = alone.vote([True], step_id=1)
    alone.close()
    return {"seconds": seconds, "verdict": verdict, "cause": type(caught.value.__cause__).__name__}


def past_main(rank: int, world_size: int, path: Path) -> list[float]:
    if rank == 0:  # it has been through three attempts that failed in three ways, the others through none
        store = dist.FileStore(str(path / "nobody"), world_size)
        with pytest.raises(PeerLostError, match=r"generation 0: rank 1 did not arrive within 0\.1 s"):
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
    total: list[float] = group.all_reduce(torch.tensor([rank + 1.0])).tolist()
    group.close()
    return total


def test_ranks_come_together_whatever_their_former_attempts_were(tmp_path: Path) -> None:
    assert run_ranks(past_main, 2, tmp_path) == [[3.0], [3.0]]


@pytest.mark.alone
def test_a_killed_peer_is_noticed_at_once_and_the_survivor_goes_on_alone(tmp_path: Path) -> None:
    survivor, dead = run_ranks(death_main, 2, tmp_path, may_die=True)
    assert isinstance(dead, DiedError)
    assert survivor["seconds"] < 5.0
    assert survivor["verdict"] == [True]


def test_a_missing_peer_is_reported_after_the_timeout(tmp_path: Path) -> None:
    with pytest.raises(PeerLostError, match=r"rank 1 did not arrive within 0\.5 s"):
        form_group(tmp_path, 0, 2, timeout_s=0.5)
    assert not dist.is_initialized()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(2, 1), nn.Linear(2, 1)
        self.value, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward_train(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name)(obs) for name, obs in batch.items()}


def gradients_main(rank: int, world_size: int, path: Path) -> list[Any]:
    group = form_group(path, rank, world_size)
    module = TwoHeads()
    forward = DataParallelForward({"both": module}, module.forward_train, group)
    history = []
    for step in range(4):
        # ranks differ in what they have: rank 1 has "a" in even steps only, never "b"
        batch = {"a": torch.full((3, 2), 1.0 + rank)} if rank == 0 or step % 2 == 0 else {}
        if rank == 0 and step < 3:
            batch["b"] = torch.ones(3, 2)
        outputs = forward.forward_train(batch)
        loss = torch.zeros((), requires_grad=True)
        for output in outputs.values():
            loss = loss + output.mean()
        if "a" in batch:
            loss = loss + module.value(batch["a"]).mean()
        module.zero_grad()
        forward.backward(loss)
        history.append(
            {name: p.grad[0, 0].item() for name, p in module.named_parameters() if "weight" in name}
        )
    group.close()
    return history


def test_gradients_are_the_ranks_mean_whatever_each_rank_has(tmp_path: Path) -> None:
    first, second = run_ranks(gradients_main, 2, tmp_path)
    assert first == second
    even = {"a.weight": 1.5, "b.weight": 0.5, "value.weight": 1.5, "unused.weight": 0.0}
    odd = {"a.weight": 0.5, "b.weight": 0.5, "value.weight": 0.5, "unused.weight": 0.0}
    assert first == [even, odd, even, odd | {"b.weight": 0.0}]


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
