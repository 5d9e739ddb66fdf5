"""Multi-agent replay buffers: items are steps of a module's own agents; synchronized ones are of the same env steps."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from rlzmq.core.plain import from_plain, to_plain
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.replay import MultiAgentEpisodeReplayBuffer, MultiAgentPrioritizedEpisodeReplayBuffer
from rlzmq.replay.replay_buffer import divide_buffers
from tests.replay.test_episode_replay_buffer import rows_of

BUFFERS = (MultiAgentEpisodeReplayBuffer, MultiAgentPrioritizedEpisodeReplayBuffer)
MODULES = {"a": "p", "b": "q", "c": "q"}


def observation(index: int, t: int, agent: str) -> float:
    """Tells episode, env step and agent."""
    return 1000.0 * index + 10.0 * t + "abc".index(agent)


def mapping(agent_id: str, episode: Any) -> str:
    return MODULES[agent_id]


def episode_of(
    index: int, length: int, *, agents: str = "abc", end: str = "terminateds", b_every: int = 1
) -> MultiAgentEpisode:
    """Every agent steps at every env step, `b` only at each `b_every`-th; action t, reward t + 1."""
    episode = MultiAgentEpisode(f"e{index}", agent_to_module_mapping_fn=mapping)
    episode.add_env_reset(observations={agent: observation(index, 0, agent) for agent in agents})
    for t in range(length):
        acting = [agent for agent in agents if agent != "b" or t % b_every == 0]
        seeing = [a for a in agents if a != "b" or (t + 1) % b_every == 0 or t + 1 == length]
        episode.add_env_step(
            {agent: observation(index, t + 1, agent) for agent in seeing},
            dict.fromkeys(acting, t),
            {agent: float(t + 1) for agent in seeing},
            **({end: {"__all__": True}} if end and t + 1 == length else {}),
        )
    return episode.to_numpy()


@pytest.mark.parametrize("cls", BUFFERS)
def test_each_modules_items_are_the_steps_of_its_agents(cls: Any) -> None:
    buffer = cls(100, seed=1)
    buffer.add(episode_of(0, 3))
    buffer.add([episode_of(1, 2, agents="ab", end="truncateds")])
    expected = {
        module: {
            (
                observation(e, t, agent),
                observation(e, t + 1, agent),
                t,
                t + 1.0,
                (e, t) == (0, 2),
                (e, t) == (1, 1),
            )
            for e, length, agents in ((0, 3, "abc"), (1, 2, "ab"))
            for t in range(length)
            for agent in agents
            if MODULES[agent] == module
        }
        for module in "pq"
    }
    samples = buffer.sample_modules(300)
    assert {module: set(rows_of(batch)) for module, batch in samples.items()} == expected
    assert {module: len(batch) for module, batch in samples.items()} == {"p": 300, "q": 300}
    assert (len(buffer), buffer.get_num_timesteps("p"), buffer.get_num_timesteps("q")) == (5, 5, 8)
    assert buffer.get_added_timesteps() == 5
    assert buffer.get_sampled_timesteps("p") == 300
    metrics = buffer.get_metrics()
    assert metrics["num_episodes_added_lifetime"] == 2
    assert metrics["num_env_steps_evicted_lifetime"] == 0
    assert metrics["num_module_steps_stored"] == {"p": 5, "q": 8}
    assert metrics["num_module_episodes"] == {"p": 2, "q": 3}
    assert metrics["num_module_steps_sampled_lifetime"] == {"p": 300, "q": 300}
    assert "module_actual_n_step" not in metrics
    episodes = buffer.sample(4, modules_to_sample=["q"])
    assert [type(episode) for episode in episodes] == [SingleAgentEpisode] * 4
    assert {episode.module_id for episode in episodes} == {"q"}


def test_chunks_of_an_episode_are_joined_agent_by_agent() -> None:
    buffer = MultiAgentEpisodeReplayBuffer(100, seed=1)
    whole = episode_of(0, 6)
    for begin, end in ((0, 2), (2, 3), (3, 6)):
        buffer.add(EpisodeBatch.from_episodes([whole.slice(slice(begin, end))]))
    assert buffer.get_metrics()["num_episodes_added_lifetime"] == 1
    batch = buffer.sample_modules(200, n_step=3, gamma=0.5)["p"]
    first = {(obs, following, reward) for obs, following, _, reward, *_ in rows_of(batch)}
    assert (observation(0, 1, "a"), observation(0, 4, "a"), 2 + 3 / 2 + 4 / 4) in first
    assert {episode.get_observations(0) for episode in batch} == {observation(0, t, "a") for t in range(6)}


@pytest.mark.parametrize("cls", BUFFERS)
def test_synchronized_items_are_of_the_same_env_steps(cls: Any) -> None:
    buffer = cls(100, seed=1)
    buffer.add([episode_of(0, 5), episode_of(1, 4, agents="ab"), episode_of(2, 3, agents="a")])
    samples = buffer.sample_modules(
        50, replay_mode="synchronized", n_step=(1, 2), gamma=1.0, sample_episodes=True, to_numpy=True
    )
    with pytest.raises(ValueError, match="expected sample_episodes=True"):
        buffer.sample(50, replay_mode="synchronized", sample_episodes=False)
    n_steps = buffer.get_metrics()["module_actual_n_step"]
    assert n_steps == {
        module: pytest.approx(batch.columns["n_step"][batch.start].mean())
        for module, batch in samples.items()
    }
    drawn = [(int(obs // 1000), int(obs % 1000 // 10)) for obs, *_ in rows_of(samples["p"])]
    assert {e for e, _ in drawn} == {0, 1}, "episode 2 has no agent of module q"
    assert (4, 3) not in drawn
    wanted = [observation(e, t, agent) for e, t in drawn for agent in ("bc" if e == 0 else "b")]
    assert [obs for obs, *_ in rows_of(samples["q"])] == wanted
    n_of_p = dict(zip(range(50), samples["p"].columns["n_step"][::2].tolist(), strict=True))
    assert set(n_of_p.values()) == {1, 2}
    assert samples["q"].columns["weights"].min() == samples["q"].columns["weights"].max() == 1.0


def test_synchronized_items_stay_aligned_when_steps_are_evicted_and_slots_used_again() -> None:
    buffer = MultiAgentEpisodeReplayBuffer(20, seed=1)
    for index in range(12):
        buffer.add(episode_of(index, 3 + index % 4, agents="ab" if index % 3 else "abc"))
        samples = buffer.sample_modules(20, replay_mode="synchronized")
        p = {int(obs) // 10 for obs, *_ in rows_of(samples["p"])}
        assert {int(obs) // 10 for obs, *_ in rows_of(samples["q"])} == p
        held = {int(obs) // 10 for module in "pq" for obs in all_observations(buffer, module)}
        assert len(buffer) == len(held)
        assert len(buffer) <= 20


def all_observations(buffer: Any, module_id: str) -> list[float]:
    """Of the steps that a module has stored."""
    if module_id not in buffer.buffers:
        return []
    stored = buffer.buffers[module_id].episodes
    return [obs for episode in stored for obs in episode.get_observations(slice(0, len(episode))).tolist()]


def test_env_steps_are_counted_once_however_many_agents_step() -> None:
    buffer = MultiAgentEpisodeReplayBuffer(12, seed=1)
    whole = episode_of(0, 9, agents="ab", b_every=3)
    for begin, end in ((0, 4), (4, 5), (5, 9)):  # a step of b begins in one chunk and ends in the next
        buffer.add(whole.slice(slice(begin, end)))
    assert (len(buffer), buffer.get_added_timesteps()) == (9, 9)
    pairs = [rows_of(batch) for batch in buffer.sample_modules(30, replay_mode="synchronized").values()]
    assert [obs + 1 for obs, *_ in pairs[0]] == [obs for obs, *_ in pairs[1]]
    for index in range(1, 40):
        buffer.add(episode_of(index, 4, agents="b" if index % 2 else "a"))
    assert buffer.get_added_timesteps() == 9 + 39 * 4
    assert (len(buffer), buffer.get_num_timesteps("p"), buffer.get_num_timesteps("q")) == (12, 4, 8)


def test_priorities_belong_to_a_modules_steps() -> None:
    buffer = MultiAgentPrioritizedEpisodeReplayBuffer(100, alpha=1.0, seed=1)
    buffer.add(episode_of(0, 4))
    batch = buffer.sample_modules(200, modules_to_sample=["p"])["p"]
    keys, observed = (batch.columns[name][batch.start] for name in ("replay_key", "obs"))
    buffer.update_priorities(np.where(observed == observation(0, 2, "a"), 1.0, 0.0), "p", keys)
    again = buffer.sample_modules(100)
    assert {obs for obs, *_ in rows_of(again["p"])} == {observation(0, 2, "a")}
    assert len({obs for obs, *_ in rows_of(again["q"])}) == 8
    buffer.add(episode_of(1, 2), weight={"p": 1e9, "q": 1.0})
    assert {obs // 1000 for obs, *_ in rows_of(buffer.sample_modules(50)["p"])} == {1.0}


@pytest.mark.parametrize("cls", BUFFERS)
def test_a_state_brings_everything_back(cls: Any) -> None:
    buffer, other = cls(60, seed=1), cls(60, seed=2)
    open_episode = episode_of(3, 6, end="")
    for episode in (episode_of(0, 5), episode_of(1, 20), open_episode.slice(slice(0, 2))):
        buffer.add(episode)
    state = from_plain(msgpack.unpackb(msgpack.packb(to_plain(buffer.get_state())), strict_map_key=False))
    other.add(episode_of(7, 3))
    other.set_state(state)
    for one in (buffer, other):
        one.add(open_episode.slice(slice(2, 6)))
    for mode in ("independent", "synchronized"):
        mine, theirs = (one.sample_modules(30, n_step=2, replay_mode=mode) for one in (buffer, other))
        for module in "pq":
            assert rows_of(mine[module]) == rows_of(theirs[module])
    assert buffer.get_metrics() == other.get_metrics()


@pytest.mark.parametrize("cls", BUFFERS)
def test_what_was_added_since_a_mark_can_be_undone(cls: Any) -> None:
    buffer = cls(100, seed=1)
    buffer.add(episode_of(0, 3, agents="a"))
    open_episode = episode_of(2, 6, agents="ab")
    buffer.add(open_episode.slice(slice(0, 2)))
    before = buffer.get_metrics()
    for _ in range(2):
        buffer.mark()
        buffer.add(episode_of(1, 3, agents="ab"))
        buffer.add(open_episode.slice(slice(2, 6)))
        buffer.undo()
        after = buffer.get_metrics()
        for name, value in before.items():
            if isinstance(value, dict):
                assert {id_: after[name][id_] for id_ in value} == value, name
            else:
                assert after[name] == value, name
    buffer.undo()
    assert buffer.get_added_timesteps() == 5
    buffer.add(open_episode.slice(slice(2, 6)))
    assert len(buffer) == 9
    pairs = [rows_of(batch) for batch in buffer.sample_modules(30, replay_mode="synchronized").values()]
    assert [obs + 1 for obs, *_ in pairs[0]] == [obs for obs, *_ in pairs[1]]


@pytest.mark.parametrize("cls", BUFFERS)
def test_steps_of_other_modules_are_counted_and_not_kept(cls: Any) -> None:
    buffer = cls(100, seed=1)
    buffer.keep_modules(["q"])
    buffer.add(episode_of(0, 3))
    assert buffer.get_module_ids() == ["q"]
    assert buffer.num_agent_steps_not_kept == 3
    buffer.keep_modules(["p", "q"])
    buffer.add(episode_of(1, 4))
    buffer.mark()
    buffer.add(episode_of(2, 5, agents="ab"))
    before = buffer.get_metrics()["num_module_steps_stored"]
    buffer.keep_modules(["q"])
    assert (len(buffer), buffer.get_module_ids()) == (12, ["q"])
    assert buffer.get_metrics()["num_agent_steps_not_kept"] == 3 + before["p"]
    buffer.undo()
    assert len(buffer) == 7
    assert buffer.num_agent_steps_not_kept == 3 + before["p"], "the removal stays"
    buffer.keep_modules(["p", "q"])
    buffer.add(episode_of(3, 2, agents="a"))
    assert {obs // 1000 for obs, *_ in rows_of(buffer.sample_modules(30)["p"])} == {3.0}


def test_bad_input_is_named() -> None:
    buffer = MultiAgentEpisodeReplayBuffer(100, seed=1)
    for wrong in (SingleAgentEpisode(), 3, "abc", [SingleAgentEpisode()]):
        with pytest.raises(TypeError, match="expected MultiAgentEpisodes"):
            buffer.add(wrong)
    with pytest.raises(ValueError, match="no stored step of 'any module'"):
        buffer.sample(3)
    with pytest.raises(TypeError, match=r"expected no weight, got 2\.0"):
        buffer.add(episode_of(0, 3), weight=2.0)
    buffer.add(episode_of(0, 3, agents="a"))
    buffer.add(episode_of(1, 3, agents="b"))
    with pytest.raises(ValueError, match=r"no stored step of 'r'; modules: \['p', 'q'\]"):
        buffer.sample(3, modules_to_sample=["r"])
    with pytest.raises(ValueError, match=r"all modules \['p', 'q'\] have a step"):
        buffer.sample(3, replay_mode="synchronized")
    with pytest.raises(ValueError, match="synchronized replay is for transitions"):
        buffer.sample(3, replay_mode="synchronized", batch_length_T=4)
    with pytest.raises(ValueError, match=r"replay_mode .*, got 'lockstep'"):
        buffer.sample(3, replay_mode="lockstep")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected capacity >= 1, got 0"):
        MultiAgentEpisodeReplayBuffer(0)


@pytest.mark.parametrize("cls", BUFFERS)
@pytest.mark.parametrize("num_buffers", [1, 2, 3])
def test_states_are_divided_by_episodes_with_their_env_steps(cls: Any, num_buffers: int) -> None:
    given = [cls(100, seed=seed) for seed in range(2)]
    for index in range(6):
        given[index % 2].add(episode_of(index, 2 + index, agents="abc" if index % 3 else "ab"))
    given[1].add(episode_of(7, 2, agents="c"))
    divided = [cls(100, seed=seed) for seed in range(num_buffers)]
    for buffer, state in zip(
        divided, divide_buffers([one.get_state() for one in given], num_buffers), strict=True
    ):
        buffer.set_state(state)
    held = [
        {module: sorted(all_observations(buffer, module)) for module in buffer.buffers} for buffer in divided
    ]
    for module in "pq":
        wanted = sorted(obs for buffer in given for obs in all_observations(buffer, module))
        assert sorted(obs for one in held for obs in one.get(module, [])) == wanted
    assert sum(map(len, divided)) == sum(map(len, given))
    assert sum(buffer.get_metrics()["num_episodes_added_lifetime"] for buffer in divided) == 7
