"""Equal shards, and the account of env steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlzmq import EpisodeBatch, SingleAgentEpisode
from rlzmq.driver.async_learner_group import shard_episodes
from rlzmq.driver.synchronous import drive
from rlzmq.driver.updates import Accounting


def episode(length: int, first: float = 0.0) -> SingleAgentEpisode:
    return SingleAgentEpisode(
        observations=[np.float32([first + i]) for i in range(length + 1)],
        actions=[0] * length,
        rewards=[first + i for i in range(length)],
        terminated=True,
        len_lookback_buffer=0,
    )


@pytest.mark.parametrize(("lengths", "ranks"), [([10], 3), ([1, 1, 1], 3), ([5, 7, 2], 2), ([100], 1)])
def test_every_rank_gets_equally_many_steps_and_no_step_twice(lengths: list[int], ranks: int) -> None:
    episodes = [episode(length, 1000.0 * i) for i, length in enumerate(lengths)]
    for given in (episodes, EpisodeBatch.from_episodes([e.to_numpy() for e in episodes])):
        shards, num_steps = shard_episodes(given, ranks)
        sizes = [sum(len(e) for e in shard) for shard in shards]
        assert sizes == [sum(lengths) // ranks] * ranks
        assert num_steps == sum(sizes)
        rewards = np.concatenate([np.asarray(e.get_rewards()) for shard in shards for e in shard])
        expected = np.concatenate([np.asarray(e.get_rewards()) for e in episodes])[:num_steps]
        np.testing.assert_array_equal(rewards, expected)


def test_a_cut_episode_is_done_in_its_last_part_only() -> None:
    shards, _ = shard_episodes([episode(10)], 2)
    assert [e.is_done for shard in shards for e in shard] == [False, True]
    assert [e.t_started for shard in shards for e in shard] == [0, 5]


def test_too_few_steps_for_the_ranks_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 env steps cannot be shared by 3"):
        shard_episodes([episode(2)], 3)


def test_the_account_always_adds_up() -> None:
    account = Accounting()
    account.add(sampled=100)
    account.add(trained=60, dropped={"surplus": 3})
    assert account.to_dict() == {"sampled": 100, "trained": 60, "dropped": {"surplus": 3}, "pending": 37}
    assert str(account) == "sampled 100 = trained 60 + dropped 3 (surplus 3) + pending 37"
    account.drop_pending("stopped")
    assert account.pending == 0
    with pytest.raises(AssertionError, match="settled more"):
        account.add(trained=1)


def test_drive_runs_what_never_waits_and_refuses_what_does() -> None:
    async def inner() -> int:
        return 3

    async def outer() -> int:
        return await inner() + 1

    assert drive(outer()) == 4

    async def waits() -> None:
        import asyncio

        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="waits for another process"):
        drive(waits())


def _results(*sources: tuple[str, int, int], num_ranks: int = 2) -> list[dict[str, Any]]:
    """Of ranks whose sources (id, steps held, steps ever added) are these."""
    return [
        {
            "__all_modules__": {
                "batch_source": {
                    "source_id": source_id, "num_ranks": num_ranks, "num_env_steps": held, "num_added": added,
                }
            }
        }
        for source_id, held, added in sources
    ]  # fmt: skip


def test_what_a_dead_ranks_source_held_is_lost_once() -> None:
    account = Accounting()
    account.add(sampled=100, trained=100)
    account.note_sources(_results(("a", 50, 50), ("b", 50, 50)))
    account.add(sampled=100, trained=100)
    account.note_sources(_results(("a", 90, 100)))  # b's results went with it: it may live
    assert account.to_dict()["dropped"] == {}
    account.add(sampled=100, trained=100)
    # It took in 40 of the second batch before it died; of a's, 20 have left to make room.
    account.note_sources(_results(("a", 120, 160), ("c", 50, 50)))
    assert account.to_dict() == {
        "sampled": 300, "trained": 210, "dropped": {"buffer_lost": 50 + 40}, "pending": 0,
    }  # fmt: skip
    account.note_sources(_results(("a", 120, 160), ("c", 50, 50)))
    assert account.trained == 210
    assert account.num_consumed == 300


def test_a_restored_run_has_lost_what_its_sources_held_unless_they_were_stored() -> None:
    account = Accounting()
    account.add(sampled=120, trained=100)
    account.note_sources(_results(("a", 60, 100), num_ranks=1))
    state = account.get_state()
    without, restored = Accounting(), Accounting()
    without.set_state(state)
    assert without.to_dict()["dropped"] == {"restored": 20, "buffer_lost": 60}
    without.add(sampled=10, trained=10)
    without.note_sources(_results(("b", 10, 10), num_ranks=1))
    assert without.trained == 50
    restored.set_state(state, with_sources=True)
    assert restored.to_dict()["dropped"] == {"restored": 20}
    account.set_state(state)  # in place: its sources live
    assert account.to_dict()["dropped"] == {"restored": 20}
