"""Random operation sequences: MultiAgentEpisode against the brute-force model; batches, on the wire too."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import numpy as np
import pytest

from rlzmq.core.errors import MultiAgentEnvError
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from tests.episodes.multi_agent_model import AGENTS, Model, Step, assert_same, assert_same_getter, random_step
from tests.episodes.reference_model import Token
from tests.episodes.test_episode_wire import received


def mapping(agent_id: object, episode: MultiAgentEpisode) -> str:
    return f"m{agent_id}"


class Sequence:
    """One episode with its model, and the chunks that were cut off on the way."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.counter = [0]
        self.model = Model()
        if rng.random() < 0.25:
            self.model.make = Token
        self.episode = MultiAgentEpisode("e", agent_to_module_mapping_fn=mapping)
        self.chunks: list[tuple[MultiAgentEpisode, Model]] = []
        present = [agent for agent in AGENTS if rng.random() < 0.6]
        self.model.reset = {agent: self._fresh() for agent in present}
        self.episode.add_env_reset(observations=self.model.reset)

    def _fresh(self) -> int:
        self.counter[0] += 1
        return self.model.make(self.counter[0])  # type: ignore[no-any-return]

    def step(self) -> None:
        step = random_step(self.rng, self.model, self.counter)
        step.add_to(self.episode)
        self.model.add(step)

    def cut(self) -> None:
        lookback = self.rng.randrange(4)
        self.chunks.append((self.episode, self.model))
        self.episode, self.model = self.episode.cut(lookback), self.model.cut(lookback)

    def slice(self) -> None:
        num = len(self.episode) + 2
        start, stop = self.rng.randrange(-num, num), self.rng.randrange(-num, num)
        lookback = self.rng.choice([None, 0, 1, 3])
        if self.rng.random() < 0.15:
            assert_same(self.episode[:], self.model)
            return
        part = self.episode.slice(slice(start, stop), len_lookback_buffer=lookback)
        model = self.model.slice(start, stop, lookback)
        assert_same(part, model)
        assert_same_getter(self.rng, part, model)

    def join_cuts(self) -> None:
        """All chunks put together are the episode that was never cut."""
        if not self.chunks:
            return
        whole = copy.deepcopy(self.chunks[0][0])
        for chunk, _ in [*self.chunks[1:], (self.episode, self.model)]:
            whole.concat_episode(chunk)
        model = self.model.copy()
        model.begin, model.lookback, model.first, model.start = 0, 0, {}, {}
        model.hidden = set()
        assert_same(whole, model)

    def join_slices(self) -> None:
        """An episode sliced in two and put together is the same again."""
        middle = self.rng.randrange(len(self.episode) + 1)
        lookback = self.rng.choice([0, 2])
        first = self.episode[:middle]
        if first.is_done:
            return
        first.concat_episode(self.episode.slice(slice(middle, None), len_lookback_buffer=lookback))
        assert_same(first, self.model)

    def give(self) -> None:
        """An episode made of lists, the rewards of one env step more among them, is one that was stepped."""
        log = self.model.log
        if any({**step.terminateds, **step.truncateds} for step in log):
            return
        hanging = {agent: self.rng.randrange(1, 9) for agent in AGENTS if self.rng.random() < 0.5}
        model = Model()
        model.reset = self.model.reset
        for step in log:
            model.add(step)
        if hanging:
            model.add(Step({}, {}, hanging, {}, {}, {}, {}))
        episode = MultiAgentEpisode(
            "e",
            agent_to_module_mapping_fn=mapping,
            observations=[model.reset, *(step.observations for step in log)],
            infos=[{}, *(step.infos for step in log)],
            actions=[step.actions for step in log],
            rewards=[*(step.rewards for step in log), *([hanging] if hanging else [])],
            extra_model_outputs=[step.outputs for step in log],
            len_lookback_buffer=0,
        )
        assert_same(episode, model)
        assert_same_getter(self.rng, episode, model)

    def round_trip(self) -> None:
        state = self.episode.get_state()
        self.episode = self.rng.choice(
            [
                lambda episode: MultiAgentEpisode.from_state(pickle.loads(pickle.dumps(state))),
                lambda episode: pickle.loads(pickle.dumps(episode)),
                copy.deepcopy,
            ]
        )(self.episode)
        assert self.episode.get_state() == state

    def to_numpy(self) -> None:
        episode = copy.deepcopy(self.episode).to_numpy()
        assert_same(episode, self.model)
        assert_same_getter(self.rng, episode, self.model)

    def refuse(self) -> None:
        """Data that the rules forbid raise, and change nothing."""
        for step in forbidden_steps(self.model):
            with pytest.raises(MultiAgentEnvError):
                step.add_to(self.episode)

    def check(self) -> None:
        assert_same(self.episode, self.model)
        assert_same_getter(self.rng, self.episode, self.model)


def forbidden_steps(model: Model) -> list[Step]:
    steps = []
    for agent in AGENTS:
        life = model.life(agent)
        empty = Step({}, {}, {}, {}, {}, {}, {})
        came_before = life.reward if life.obs else life.before
        if not model.is_done() and life.done_t is None and came_before:  # nothing to add it to
            steps.append(Step({}, {}, {agent: "x"}, {}, {}, {}, {}))  # type: ignore[dict-item]
        if model.is_done() or life.done_t is not None:
            steps += [Step({agent: 1}, {}, {}, {}, {}, {}, {}), Step({}, {}, {agent: 1}, {}, {}, {}, {})]
            if model.is_done():
                steps.append(empty)
        elif not life.obs:
            steps.append(Step({}, {agent: 1}, {}, {}, {}, {}, {}))
        elif life.pending is not None:
            steps.append(Step({}, {agent: 1}, {}, {}, {}, {}, {}))  # acts twice
            steps.append(Step({}, {}, {}, {}, {}, {agent: True}, {}))  # truncated without observation
        else:
            steps.append(Step({agent: 1}, {}, {}, {}, {}, {}, {}))  # observes without having acted
            outputs = {agent: {"logp": 1}}
            steps.append(Step({agent: 1}, {agent: 1}, {}, {}, {}, {}, outputs))  # no reward
            steps.append(
                Step({agent: 1}, {agent: 1}, {agent: 1}, {}, {}, {agent: False}, {agent: {"late": 1}})
            )
            if not life.steps:
                steps.pop()
    return steps


OPERATIONS = ["step"] * 8 + [
    "cut",
    "cut",
    "slice",
    "join_cuts",
    "join_slices",
    "to_numpy",
    "give",
    "round_trip",
    "refuse",
]


def run_sequence(seed: int, num_operations: int) -> None:
    rng = random.Random(seed)
    sequence = Sequence(rng)
    for _ in range(num_operations):
        operation = rng.choice(OPERATIONS)
        if operation in ("step", "cut") and sequence.model.is_done():
            operation = "slice"
        getattr(sequence, operation)()
    sequence.check()
    sequence.join_cuts()


@pytest.mark.parametrize("part", [0, *(pytest.param(more, marks=pytest.mark.slow) for more in (1, 2, 3))])
def test_random_operation_sequences_agree_with_the_brute_force_model(part: int) -> None:
    for seed in range(500 * part, 500 * (part + 1)):
        try:
            run_sequence(seed, 9)
        except BaseException as error:
            error.add_note(f"operation sequence of seed {seed}: run_sequence({seed}, 9)")
            raise


def test_long_operation_sequences_agree_with_the_brute_force_model() -> None:
    for seed in range(1_000_000, 1_000_040):
        try:
            run_sequence(seed, 60)
        except BaseException as error:
            error.add_note(f"operation sequence of seed {seed}: run_sequence({seed}, 60)")
            raise


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
