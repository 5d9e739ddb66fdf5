"""Gradients through shared memory, in real processes: the bits of gloo, deaths, freezes; LeanAdam is torch's Adam."""

from __future__ import annotations

import copy
import gc
import logging
import mmap
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn

from rlzmq.core.errors import PeerLostError
from rlzmq.episodes.columns import Columns
from rlzmq.learners import distributed
from rlzmq.learners.distributed import RankGroup, SharedRows
from rlzmq.learners.learner import Learner
from rlzmq.learners.optimizers import LeanAdam
from tests.learners.cases import SquareLearner, episode_batch, ppo_config, ppo_learner, rows, square_learner
from tests.learners.ranks import DiedError, form_group, join, run_ranks, without_memory
from tests.support.forked import child_unmaps_only_its_own


def mlp() -> Learner:
    return ppo_learner(ppo_config({"fcnet_hiddens": [32, 32]}, grad_clip=0.5, kl_coeff=0.1))


def modules_of_which_one_is_not_trained() -> Learner:
    learner = square_learner("a", "b", "c", minibatch_size=4, num_epochs=2)
    learner.policies_to_train = ["a", "c"]
    for parameter in learner.module["c"].extra.parameters():
        parameter.requires_grad_(False)
    learner.module["a"].layer.double()
    learner.module["a"].scale = nn.BatchNorm1d(4).double()
    learner.optimizers.remove("a")
    learner.configure_optimizers_for_module("a", learner.config)
    learner.module["a"].register_buffer("flags", torch.tensor([True, False, True]))
    return learner


class NormedLearner(SquareLearner):
    """Buffers (running statistics) that differ by rank unless rank 0's reach all."""

    def compute_loss_for_module(self, *, module_id: str, batch: Any, fwd_out: Any, **kwargs: Any) -> Tensor:
        scale = getattr(self.module[module_id], "scale", None)
        outputs: Tensor = fwd_out[Columns.ACTION_DIST_INPUTS]
        return outputs.square().mean() + (
            0.0 if scale is None else scale(batch[Columns.OBS].double()).pow(3).mean()
        )


def group_of(learner: Learner) -> RankGroup:
    assert learner.ranks.group is not None
    return learner.ranks.group


CASES = {"mlp": mlp, "modules": modules_of_which_one_is_not_trained}


def on_host(name: str) -> None:
    """Let this process's rank believe that it runs on a host of this name."""
    distributed.process_space = lambda: name


def update_main(
    rank: int, world_size: int, path: Path, case: str, shares_memory: bool, hosts: str = ""
) -> Any:
    if not shares_memory:
        RankGroup.share_rows = without_memory  # type: ignore[method-assign]
    if hosts:
        on_host(hosts[rank])
    learner = CASES[case]()
    if case == "modules":
        learner.__class__ = NormedLearner
    join(learner, path, rank, world_size)
    hashes, norms = [], []
    for update in range(2):
        if case == "modules":
            columns = rows(8 + 4 * rank, seed=10 * update + rank)
            first = {name: column.double() for name, column in columns.items()}
            of_modules = {"a": first, "b": columns} | ({"c": columns} if rank == 0 else {})
            results = learner.update(batch=of_modules)
        else:
            results = learner.update(episodes=episode_batch(40 + rank, 24, 10 * update + 3))
        hashes.append(learner.parameter_hash())
        of_module = results["a" if case == "modules" else "default_policy"]
        norms.append(of_module["gradients_default_optimizer_global_norm"])
    return group_of(learner).shares_memory, hashes, norms


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_get_the_bits_of_gloo(tmp_path: Path, case: str) -> None:
    results = []
    for shares_memory in (True, False):
        (path := tmp_path / str(shares_memory)).mkdir()
        ranks = run_ranks(update_main, 2, path, case, shares_memory)
        assert [is_shared for is_shared, *_ in ranks] == [shares_memory] * 2
        results.append([of_rank[1:] for of_rank in ranks])
    assert results[0] == results[1]
    first, second = ([hashes for hashes, _ in result] for result in results)
    assert first == second
    assert first[0] == first[1]
    assert len(set(first[0])) == 2


@pytest.mark.parametrize(
    ("case", "hosts"), [("mlp", "aabb"), pytest.param("modules", "aba", marks=pytest.mark.slow)]
)
def test_ranks_of_several_hosts_sum_within_each_host_first(tmp_path: Path, case: str, hosts: str) -> None:
    results = []
    for number, names in enumerate((hosts, hosts, "a" * len(hosts))):
        (path := tmp_path / str(number)).mkdir()
        results.append(run_ranks(update_main, len(hosts), path, case, True, names))
    first, again, one_host = results
    assert first == again
    assert all(shares_memory for shares_memory, *_ in first)
    if case == "mlp":
        assert all(result == ranks[0] for ranks in (first, one_host) for result in ranks)
    norms = [[of_rank[2] for of_rank in result] for result in (first, one_host)]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-4)


def test_hosts_of_one_rank_each_use_gloo(tmp_path: Path) -> None:
    results = run_ranks(update_main, 2, tmp_path, "mlp", True, "ab")
    assert results[0] == results[1]
    assert not results[0][0]


def exchange_main(rank: int, world_size: int, path: Path) -> Any:
    group = form_group(path, rank, world_size)
    shared = group.share_rows(1000)
    assert shared is not None
    random, seen = torch.Generator().manual_seed(rank), []
    for number in range(2000):
        turn = shared.begin()
        shared.rows[turn, rank, :1000] = (number + rank) % 251
        shared.post()
        if torch.rand((), generator=random) < 0.01:
            time.sleep(0.001)  # longer than peers spin
        read = shared.rows[shared.wait(), :, :1000]
        if torch.rand((), generator=random) < 0.01:
            time.sleep(0.001)  # peers are ahead by one exchange
        seen.append([sorted(set(row.tolist())) for row in read])
    mapped = num_mapped()
    shared.close()
    shared.close()
    group.close()
    del shared, read, group
    gc.collect()
    return seen, mapped, num_mapped()


def num_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("rlzmq_ranks")


def test_rows_are_whole_whichever_rank_is_ahead_and_nothing_remains(tmp_path: Path) -> None:
    before = os.listdir("/dev/shm")
    for seen, mapped, left in run_ranks(exchange_main, 3, tmp_path):
        assert seen == [[[(number + rank) % 251] for rank in range(3)] for number in range(2000)]
        assert mapped == 2  # the group's numbers and these rows
        assert left == 0
    assert os.listdir("/dev/shm") == before


class FallingLearner(SquareLearner):
    """Rank 1 falls at a chosen place of a chosen minibatch: before or after it has published its gradients."""

    num_calls, falls_at, signal_number, after_post = 0, 0, signal.SIGKILL, False

    def fall(self) -> None:
        if self.rank == 1 and self.num_calls == self.falls_at:
            os.kill(os.getpid(), self.signal_number)

    def compute_gradients(self, loss_per_module: Any) -> Any:
        self.num_calls += 1
        if self.after_post:
            post = SharedRows.post

            def falling_post(rows: SharedRows) -> None:
                post(rows)
                self.fall()

            SharedRows.post = falling_post  # type: ignore[method-assign]
            try:
                return super().compute_gradients(loss_per_module)
            finally:
                SharedRows.post = post  # type: ignore[method-assign]
        self.fall()
        return super().compute_gradients(loss_per_module)


def fallen_main(
    rank: int, world_size: int, path: Path, signal_number: int, falls_at: int, after: bool, hosts: str = "aaa"
) -> Any:
    on_host(hosts[rank])
    learner = square_learner(learner_class=FallingLearner, minibatch_size=4, num_epochs=1)
    assert isinstance(learner, FallingLearner)
    learner.signal_number, learner.after_post = signal.Signals(signal_number), after
    frozen = signal_number == signal.SIGSTOP
    learner.update(batch=rows(8))  # the first one, which takes its time, before anybody waits for it
    join(learner, path, rank, world_size, timeout_s=1.0 if frozen else 30.0)
    (path / f"pid_{rank}").write_text(str(os.getpid()))
    before = learner.parameter_hash()
    learner.falls_at = learner.num_calls + falls_at
    began_at = time.monotonic()
    with pytest.raises(PeerLostError, match=f"learner rank {rank} of {world_size}") as caught:
        learner.update(batch=rows(40))
    seconds = time.monotonic() - began_at
    undone = learner.parameter_hash() == before
    learner.ranks.leave()
    if frozen and rank == 0:
        psutil.Process(int((path / "pid_1").read_text())).kill()
    join(learner, path, rank // 2, world_size - 1, generation=1)
    learner.ranks.adopt_newest_state()
    learner.update(batch=rows(40))
    return undone, learner.ranks.agree(), learner.weights_seq_no, seconds, str(caught.value)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("signal_number", "falls_at", "after", "hosts"),
    [
        (signal.SIGKILL, 1, False, "aaa"),
        (signal.SIGKILL, 3, True, "aaa"),
        (signal.SIGKILL, 7, True, "aab"),
        pytest.param(signal.SIGKILL, 3, True, "aba", marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, 3, False, "aaa", marks=pytest.mark.slow),
        (signal.SIGSTOP, 3, False, "abb"),
    ],
)
def test_a_killed_rank_is_noticed_at_once_and_a_frozen_one_given_up_after_the_timeout(
    tmp_path: Path, signal_number: int, falls_at: int, after: bool, hosts: str
) -> None:
    first, dead, third = run_ranks(
        fallen_main, 3, tmp_path, int(signal_number), falls_at, after, hosts, may_die=True
    )
    assert isinstance(dead, DiedError)
    for undone, agree, version, seconds, message in (first, third):
        assert (undone, agree, version) == (True, True, 2)
        assert seconds < 5.0
        if (signal_number, hosts) == (signal.SIGKILL, "aaa"):
            assert re.search("rank 1 has ended|rank 0 has ended or left|rank 2", message)


def log_of_ranks(level: int) -> list[tuple[int, str]]:
    """A list to which what the ranks log is added: levels and texts."""
    logged: list[tuple[int, str]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append((record.levelno, record.getMessage()))

    logger = logging.getLogger("rlzmq.learners")
    logger.setLevel(level)
    logger.addHandler(Handler())
    return logged


def fallback_main(rank: int, world_size: int, path: Path, failing_rank: int, call: str) -> Any:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    if rank == failing_rank:
        setattr(os, call, fail)
    logged = log_of_ranks(logging.WARNING)
    learner = square_learner(minibatch_size=4, num_epochs=1)
    join(learner, path, rank, world_size)
    learner.update(batch=rows(20, seed=rank))
    texts = [text for _level, text in logged]
    return (learner.ranks.agree(), group_of(learner).shares_memory, learner.weights_seq_no), texts


@pytest.mark.parametrize(
    ("failing_rank", "call"), [(0, "memfd_create"), (0, "posix_fallocate"), (1, "pidfd_open")]
)
def test_without_shared_memory_on_one_rank_all_use_gloo(tmp_path: Path, failing_rank: int, call: str) -> None:
    (first, logged), (second, others) = run_ranks(fallback_main, 2, tmp_path, failing_rank, call)
    assert first == second == (True, False, 1)
    assert logged == [
        "the learner ranks exchange gradients through gloo, without shared memory: "
        "[Errno 28] No space left on device"
    ]
    assert others == []


class OneRank:
    rank, timeout_s, host_ranks = 0, 1.0, (0,)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]


def test_a_forked_child_unmaps_nothing_but_its_own_memory() -> None:
    rows = SharedRows.map(OneRank(), 4096)  # type: ignore[arg-type]
    assert isinstance(rows, SharedRows)
    address = rows.rows.data_ptr() & -mmap.PAGESIZE
    held = [rows]
    del rows
    assert child_unmaps_only_its_own(held, [address])


class SlowLearner(SquareLearner):
    """Rank 1 takes its time over each loss, or every rank does."""

    slow_ranks: tuple[int, ...] = ()

    def compute_loss_for_module(self, **kwargs: Any) -> Tensor:
        if self.rank in self.slow_ranks:
            time.sleep(0.03)
        return super().compute_loss_for_module(**kwargs)


def speedup_main(rank: int, world_size: int, path: Path, slow_ranks: tuple[int, ...]) -> Any:
    logged = log_of_ranks(logging.INFO)
    os.sched_getaffinity = lambda pid: {0, 1, 2}
    learner = square_learner(learner_class=SlowLearner, minibatch_size=4, num_epochs=1)
    assert isinstance(learner, SlowLearner)
    learner.slow_ranks = slow_ranks
    join(learner, path, rank, world_size)
    results = [learner.update(batch=rows(20))["__all_modules__"] for _ in range(8)]
    learner.ranks.leave()
    alone = learner.update(batch=rows(20))["__all_modules__"]
    assert "speedup_over_one_rank" not in alone
    return [result["speedup_over_one_rank"] for result in results], logged, results[-1]


@pytest.mark.alone
def test_whether_several_ranks_pay_is_measured_and_logged_once(tmp_path: Path) -> None:
    (first, logged, fast), (second, others, slow) = run_ranks(speedup_main, 2, tmp_path, (1,))
    assert sorted(first)[-2] < 1.0 < sorted(second)[2], "rank 0 waits for rank 1"
    ((level, text),) = logged
    assert (level, others) == (logging.WARNING, [])
    assert re.fullmatch(
        r"2 learner ranks train at an estimated 0\.\d\d times .*: num_learners=1 would be faster\.", text
    )
    assert slow["learner_forward_timer"] >= 0.15, "five losses of 0.03 s"
    assert fast["learner_reduce_timer"] > 0.1, "the wait for the slow rank"
    assert fast["learner_reduce_timer"] > slow["learner_reduce_timer"] > 0
    for one in (fast, slow):
        stages = [one[f"learner_{name}_timer"] for name in ("forward", "backward", "reduce")]
        assert sum(stages) <= one["learner_thread_update_timer"] * 1.01


# -- Adam ----------------------------------------------------------------------------------------------


def step(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    for parameter in module.parameters():
        parameter.grad = None
    module(inputs).square().sum().backward()
    if seed == 1:  # a parameter without a gradient is left alone
        next(module.parameters()).grad = None
    optimizer.step()


@pytest.mark.parametrize("settings", [{}, {"betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.1}])
def test_lean_adam_equals_torchs_fused_adam(settings: dict[str, object]) -> None:
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    two = copy.deepcopy(one)
    lean = LeanAdam(list(one.parameters()), lr=0.1, **settings)  # type: ignore[arg-type]
    plain = torch.optim.Adam(two.parameters(), lr=0.1, fused=True, **settings)  # type: ignore[arg-type]
    for seed in range(4):
        step(one, lean, seed)
        step(two, plain, seed)
    for mine, theirs in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    again = LeanAdam(list(two.parameters()), lr=0.5)
    again.load_state_dict(plain.state_dict())
    step(one, lean, 5)
    step(two, again, 5)
    for mine, theirs in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_learners_update_and_state_do_not_import_torchs_compiler() -> None:
    code = (
        "import sys\n"
        "from tests.learners.cases import episode_batch, ppo_learner\n"
        "learner = ppo_learner()\n"
        "learner.update(episodes=episode_batch(40, 24))\n"
        "learner.get_state()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
