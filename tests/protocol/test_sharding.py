"""Which rank gets what: equal shares, or whole environments."""

from __future__ import annotations

from collections import Counter

import pytest
from core_fakes import Bench

from rlzmq.protocol.broker.updates import rank_of_env, shards_by_env, take_steps
from rlzmq.protocol.ledger import Ledger
from rlzmq.wire.codec import FragmentId
from rlzmq.wire.messages import ShardPlan
from rlzmq.wire.payloads import FragmentRange


@pytest.mark.parametrize(
    ("num_runners", "num_envs", "num_ranks"), [(1, 4, 2), (2, 1, 2), (3, 8, 3), (5, 2, 2), (2, 6, 4)]
)
def test_environments_are_dealt_out_to_ranks_about_equally(
    num_runners: int, num_envs: int, num_ranks: int
) -> None:
    counts = Counter(
        rank_of_env(f"runner-{runner}", env, num_envs, num_ranks)
        for runner in range(num_runners)
        for env in range(num_envs)
    )
    assert set(counts) == set(range(num_ranks))
    assert max(counts.values()) <= 2 * min(counts.values())


def test_environments_go_to_ranks_in_blocks_from_the_runners_number_on() -> None:
    assert [rank_of_env("runner-1", env, 4, 4) for env in range(4)] == [1, 2, 3, 0]
    assert [rank_of_env("runner-2", env, 6, 3) for env in range(6)] == [2, 2, 0, 0, 1, 1]


def test_names_of_runners_from_outside_count_too() -> None:
    assert rank_of_env("runner-3@host-77", 0, 1, 4) == 3
    assert rank_of_env("worker", 0, 1, 4) == rank_of_env("worker", 0, 1, 4) < 4


def test_ranges_are_cut_between_environments_of_different_ranks() -> None:
    ledger = Ledger()
    first, second = FragmentId("a", 1, 0), FragmentId("b", 1, 0)
    for fragment, name, env_steps in ((first, "runner-0", (3, 0, 4, 5)), (second, "runner-1", ())):
        size = sum(env_steps) or 6
        ledger.accept(fragment, size, generation=0, version=0, runner_name=name, env_steps=env_steps)
    ranges = take_steps(ledger, ledger.free_entries(), 14)
    assert shards_by_env(ledger, ranges, 2) == [[(first, 0, 3)], [(first, 3, 9), (second, 0, 2)]]
    behind = FragmentRange(first, 3, 9)
    assert shards_by_env(ledger, [behind], 2) == [[], [behind]], "no empty range for what it only touches"
    (rest,) = take_steps(ledger, ledger.free_entries(), 4)
    assert shards_by_env(ledger, [rest], 2) == [[], [(second, 2, 4)]]


def test_the_broker_keeps_an_environments_steps_at_one_rank_and_takes_all() -> None:
    bench = Bench()
    bench.ready_run(num_ranks=2, batch=40, keeps_episodes=True)
    bench.runner("runner-0")
    assert all(lease.is_sorted_by_env for lease in bench.leases("runner-0"))
    for env_steps in ((5, 5, 5, 3), (2, 5, 5, 5), (5, 5, 5, 5)):
        bench.fragment(steps=sum(env_steps), runner="runner-0", env_steps=env_steps)
    plans = [plan for rank in range(2) for plan in bench.sent(f"learner-{rank}", ShardPlan)]
    assert [plan.num_env_steps for plan in plans] == [10 + 7 + 10, 8 + 10 + 10]
    assert {plan.num_env_steps_all_ranks for plan in plans} == {55}
    ranges = bench.state.runs[0].ranges
    assert [(item.first, item.num_steps) for item in ranges] == [(0, 18), (0, 17), (0, 20)]
