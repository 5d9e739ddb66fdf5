"""Batches on columns are lists of episodes, whoever looks."""

from __future__ import annotations

import copy
import json
import operator
import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode


def single(name: str, num_steps: int = 2) -> SingleAgentEpisode:
    episode = SingleAgentEpisode(name)
    episode.add_env_reset(0)
    for t in range(num_steps):
        episode.add_env_step(t + 1, t, 1.0)
    return episode


def multi(name: str, num_steps: int = 2) -> MultiAgentEpisode:
    episode = MultiAgentEpisode(name)
    episode.add_env_reset(observations={"a": 0, "b": 0})
    for t in range(num_steps):
        episode.add_env_step({"a": t + 1, "b": t}, {"a": t, "b": t}, {"a": 1.0, "b": 0.0})
    return episode


BATCHES = [
    pytest.param(lambda *names: EpisodeBatch.from_episodes(map(single, names)), single, id="single"),
    pytest.param(lambda *names: EpisodeBatch.from_episodes(map(multi, names)), multi, id="multi"),
]
Make = Callable[..., Any]


def ids(episodes: Any) -> list[str]:
    return [episode.id_ for episode in episodes]


@pytest.mark.parametrize(("batch_of", "episode_of"), BATCHES)
def test_a_batch_is_a_list_that_makes_no_episode_until_asked(batch_of: Make, episode_of: Make) -> None:
    batch = batch_of("p", "q", "r")
    assert isinstance(batch, list)
    assert isinstance(batch, Sequence)
    assert (len(batch), bool(batch), bool(batch_of()), batch.num_env_steps) == (3, True, False, 6)
    assert batch.updated() is batch
    assert batch[1] is batch[1] is batch[-2] is list(batch)[1]
    with pytest.raises(IndexError):
        batch[3]


READERS: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "star": lambda batch: [*batch],
    "plus": lambda batch: batch + [],  # noqa: RUF005
    "plus from the left": lambda batch: [] + batch,  # noqa: RUF005
    "sum": lambda batch: sum([batch], []),  # noqa: RUF017
    "times": lambda batch: (batch * 2)[:3],
    "copy method": lambda batch: batch.copy(),
    "sorted": lambda batch: sorted(batch, key=operator.attrgetter("id_")),
    "reversed": lambda batch: list(reversed(batch))[::-1],
    "slice": lambda batch: batch[:],
    "extend": lambda batch: operator.iadd([], batch),
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch)),
    "shallow copy": copy.copy,
    "deep copy": copy.deepcopy,
    "random sample": lambda batch: sorted(random.Random(0).sample(batch, 3), key=operator.attrgetter("id_")),
    "json": lambda batch: [
        SingleAgentEpisode(e) for e in json.loads(json.dumps(batch, default=lambda e: e.id_))
    ],
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(("batch_of", "episode_of"), BATCHES)
def test_every_way_of_reading_a_list_sees_the_episodes(batch_of: Make, episode_of: Make, name: str) -> None:
    batch = batch_of("p", "q", "r")
    assert ids(READERS[name](batch)) == ["p", "q", "r"]
    assert len(batch) == 3
    assert ids(READERS[name](batch)) == ["p", "q", "r"]


@pytest.mark.parametrize(("batch_of", "episode_of"), BATCHES)
def test_batches_compare_as_lists_of_their_episodes(batch_of: Make, episode_of: Make) -> None:
    batch, other = batch_of("p", "q"), batch_of("p", "q")
    assert batch == batch
    assert batch == list(batch)
    assert list(batch) == batch
    assert batch != other
    assert batch_of() == []
    assert batch[0] in batch
    assert other[0] not in batch
    assert (batch.index(batch[1]), batch.count(batch[1]), batch.count(other[1])) == (1, 1, 0)
    assert batch <= list(batch)
    with pytest.raises(TypeError, match="unhashable"):
        hash(batch)


CHANGES: dict[str, tuple[Callable[[Any, Any], Any], list[str]]] = {
    "append": (lambda batch, new: batch.append(new), ["p", "q", "r", "n"]),
    "extend": (lambda batch, new: batch.extend([new, new]), ["p", "q", "r", "n", "n"]),
    "extend by itself": (lambda batch, new: batch.extend(batch), ["p", "q", "r"] * 2),
    "in place": (lambda batch, new: operator.iadd(batch, [new]), ["p", "q", "r", "n"]),
    "times": (lambda batch, new: operator.imul(batch, 2), ["p", "q", "r"] * 2),
    "insert": (lambda batch, new: batch.insert(0, new), ["n", "p", "q", "r"]),
    "pop": (lambda batch, new: batch.pop(), ["p", "q"]),
    "remove": (lambda batch, new: batch.remove(batch[1]), ["p", "r"]),
    "reverse": (lambda batch, new: batch.reverse(), ["r", "q", "p"]),
    "sort": (lambda batch, new: batch.sort(key=lambda e: e.id_, reverse=True), ["r", "q", "p"]),
    "set": (lambda batch, new: operator.setitem(batch, 1, new), ["p", "n", "r"]),
    "set slice": (lambda batch, new: operator.setitem(batch, slice(1, None), [new]), ["p", "n"]),
    "delete slice": (lambda batch, new: operator.delitem(batch, slice(0, 2)), ["r"]),
    "shuffle": (lambda batch, new: random.Random(3).shuffle(batch), ["q", "r", "p"]),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize(("batch_of", "episode_of"), BATCHES)
def test_changes_of_the_list_are_in_what_becomes_of_it(batch_of: Make, episode_of: Make, name: str) -> None:
    change, wanted = CHANGES[name]
    batch, plain = batch_of("p", "q", "r"), [*map(episode_of, "pqr")]
    batch.meta["runner"] = 1
    change(plain, episode_of("n"))
    change(batch, episode_of("n"))
    assert ids(batch) == ids(plain) == wanted
    assert (len(batch), batch.num_env_steps) == (len(wanted), 2 * len(wanted))
    assert ids(batch[1:]) == wanted[1:]
    updated = batch.updated()
    assert (type(updated), updated.meta, ids(updated)) == (type(batch), {"runner": 1}, wanted)
    for twin in (pickle.loads(pickle.dumps(batch)), type(batch).from_wire(*batch.to_wire())):
        assert (type(twin), ids(twin), twin.num_env_steps) == (type(batch), wanted, 2 * len(wanted))
    assert batch.get_returns().tolist() == [2.0] * len(wanted)
    if wanted:
        assert sum(part.num_env_steps for part in batch.split(1)) == 2 * len(wanted)
        assert ids(type(batch).concat([batch, batch])) == wanted * 2


@pytest.mark.parametrize(("batch_of", "episode_of"), BATCHES)
def test_changes_of_episodes_go_wherever_the_batch_goes(batch_of: Make, episode_of: Make) -> None:
    batch = batch_of("p", "q")
    batch.meta["runner"] = 1
    for episode in batch:
        for agent in getattr(episode, "agent_episodes", {None: episode}).values():
            agent.set_rewards(new_data=[2.0] * len(agent))
    batch[0].custom_data["seen"] = True
    returns = [4.0 * episode.agent_steps() / 2 for episode in batch]
    assert batch.get_returns().tolist() == returns
    for other in (
        batch.updated(),
        batch[:],
        type(batch).concat([batch]),
        pickle.loads(pickle.dumps(batch)),
        type(batch).from_wire(*batch.to_wire()),
    ):
        assert [episode.custom_data for episode in other] == [{"seen": True}, {}]
        assert (other.get_returns().tolist(), other.meta) == (returns, {"runner": 1})
