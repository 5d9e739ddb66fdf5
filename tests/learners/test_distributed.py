"""Groups of real processes: collectives, votes, death of a peer, re-forming, averaged gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlzmq.core.errors import PeerLostError
from rlzmq.core.process import loopback_interface
from rlzmq.learners.distributed import DesynchronizedError, RankGroup
from rlzmq.learners.snapshot import parameter_hash
from tests.learners.ranks import form_group, run_ranks


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
    gathered: list[list[int]] = group.gather([rank]).tolist()
    group.close()
    return gathered


def test_ranks_come_together_whatever_their_former_attempts_were(tmp_path: Path) -> None:
    assert run_ranks(past_main, 2, tmp_path) == [[[0], [1]]] * 2


def test_a_missing_peer_is_reported_after_the_timeout(tmp_path: Path) -> None:
    with pytest.raises(PeerLostError, match=r"rank 1 did not arrive within 0\.5 s"):
        form_group(tmp_path, 0, 2, timeout_s=0.5)
    assert not dist.is_initialized()


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
