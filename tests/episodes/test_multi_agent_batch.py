"""EpisodeBatch of episodes of several agents: columns and wire."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from tests.episodes.multi_agent_model import AGENTS, Model, assert_same, assert_same_getter, random_step
from tests.episodes.test_episode_wire import received


def mapping(agent_id: Any, episode: Any) -> str:
    return f"m{agent_id}"


def random_chunks(seed: int) -> list[tuple[MultiAgentEpisode, Model]]:
    """Some episodes in several chunks each."""
    rng, counter, chunks = random.Random(seed), [0], []
    for number in range(3):
        model = Model()
        episode = MultiAgentEpisode(f"e{number}", agent_to_module_mapping_fn=mapping)
        model.reset = {agent: -1 for agent in AGENTS if rng.random() < 0.6}
        episode.add_env_reset(observations=model.reset)
        for _ in range(rng.randrange(10)):
            if model.is_done():
                break
            if rng.random() < 0.2:
                lookback = rng.randrange(3)
                chunks.append((episode, model))
                episode, model = episode.cut(lookback), model.cut(lookback)
            step = random_step(rng, model, counter)
            step.add_to(episode)
            model.add(step)
        chunks.append((episode, model))
    return chunks


def test_episodes_come_out_of_columns_and_wire_as_they_went_in() -> None:
    for seed in range(80):
        rng = random.Random(seed)
        chunks = random_chunks(seed)
        batch = EpisodeBatch.from_episodes([episode for episode, _ in chunks])
        assert batch.num_env_steps == sum(len(episode) for episode, _ in chunks)
        assert batch.num_agent_steps == sum(episode.agent_steps() for episode, _ in chunks)
        assert batch.get_returns().tolist() == [episode.get_return() for episode, _ in chunks]
        for form in (batch, received(batch)):
            for episode, (_, model) in zip(form, chunks, strict=True):
                assert_same(episode, model)
                assert_same_getter(rng, episode, model)


def test_split_puts_every_agent_step_into_exactly_one_part() -> None:
    for seed in range(150):
        rng = random.Random(seed)
        batch = EpisodeBatch.from_episodes([episode for episode, _ in random_chunks(seed)])
        total = batch.num_env_steps
        cut = rng.randrange(total + 1)
        head, tail = batch.split(cut)
        assert (head.num_env_steps, tail.num_env_steps) == (cut, total - cut)
        assert head.num_agent_steps + tail.num_agent_steps == batch.num_agent_steps
        assert steps_of(head) + steps_of(tail) == steps_of(batch)
        for part in (head, tail, received(head), received(tail)):
            for episode in part:
                episode.validate()


def test_selected_episodes_come_as_often_and_in_the_order_asked_for() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        chunks = random_chunks(seed)
        batch = EpisodeBatch.from_episodes([episode for episode, _ in chunks])
        num = len(chunks)
        wanted = [rng.randrange(-num, num) for _ in range(rng.randrange(6))]
        part = batch.select(wanted)
        for episode, position in zip(part, wanted, strict=True):
            assert_same(episode, chunks[position][1])
        assert part.get_returns().tolist() == [batch[position].get_return() for position in wanted]
        mask = np.array([rng.random() < 0.5 for _ in range(num)])
        assert [e.id_ for e in batch.select(mask)] == [batch[e].id_ for e in np.flatnonzero(mask).tolist()]


def steps_of(batch: EpisodeBatch) -> Any:
    """All agents' steps, sorted."""
    import collections

    steps: Any = collections.Counter()
    for group in batch.agent_batches:
        slots, chunks = group.step_slots(), group.step_chunks()
        for slot, chunk in zip(slots.tolist(), chunks.tolist(), strict=True):
            assert group.agent_ids is not None
            agent_t = int(group.t_started[chunk] + slot - group.start[chunk])
            action, reward = group.columns["actions"][slot], group.columns["rewards"][slot]
            steps[
                group.episode_ids[chunk], str(group.agent_ids[chunk]), agent_t, int(action), float(reward)
            ] += 1
    return steps


def test_batches_of_a_module_hold_its_agents_steps_only() -> None:
    episode = MultiAgentEpisode(agent_to_module_mapping_fn=lambda agent, _: "p" if agent in (0, 1) else "q")
    episode.add_env_reset(observations={0: np.zeros(2), 1: np.ones(2), 2: np.zeros(3)})
    actions, rewards = {0: 1, 1: 0, 2: 1}, {0: 1.0, 1: 2.0, 2: 3.0}
    episode.add_env_step({0: np.zeros(2), 1: np.ones(2), 2: np.zeros(3)}, actions, rewards)
    batch = EpisodeBatch.from_episodes([episode])
    assert batch.get_module_ids() == ["p", "q"]
    assert [b.agent_ids for b in batch.batches_of("p")] == [[0, 1]]
    assert [b.columns["obs"].shape[1:] for b in batch.batches_of("q")] == [(3,)]
    assert batch.agent_steps_by("module_ids") == {"p": 2, "q": 1}
