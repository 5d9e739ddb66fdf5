"""SingleAgentEpisode: building, chunks, state, and the errors of wrong calls; its lookback buffers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from tests.episodes.multi_agent_model import facts
from tests.episodes.reference_model import Token
from tests.episodes.test_multi_agent_episode import worked


def grown(num_steps: int, **last: Any) -> SingleAgentEpisode:
    """An episode with observations 0, 1, …, actions 10, 11, … and rewards 0.5, 1.5, …"""
    episode = SingleAgentEpisode("e", action_space=gym.spaces.Discrete(99))
    episode.add_env_reset(0, {"reset": True})
    for t in range(num_steps):
        ends = last if t == num_steps - 1 else {}
        outputs = {"logp": -t, "state_out": {"h": np.full(2, t)}}
        episode.add_env_step(t + 1, 10 + t, t + 0.5, {"t": t}, extra_model_outputs=outputs, **ends)
    return episode


# -- building -----------------------------------------------------------------------------------------


def test_auto_lookback_takes_all_given_data_as_lookback() -> None:
    data = {"observations": [0, 1, 2, 3], "actions": [0, 1, 2], "rewards": [0.0, 1.0, 2.0]}
    episode = SingleAgentEpisode(**data)
    assert (len(episode), episode.t, episode.t_started, episode.get_return()) == (0, 0, 0, 0.0)
    assert episode.get_observations() == [3]
    assert episode.get_observations(-4) == 0
    assert episode.get_infos() == [{}]
    episode = SingleAgentEpisode(**data, len_lookback_buffer=0, t_started=7)
    assert (len(episode), episode.t, episode.get_return()) == (3, 10, 3.0)
    episode = SingleAgentEpisode(**data, len_lookback_buffer=9)
    assert (len(episode), episode.rewards.lookback, episode.observations.lookback) == (0, 3, 3)
    assert SingleAgentEpisode(rewards=[5, 7], observations=[0, 0, 0], actions=[0, 0],
                              len_lookback_buffer=1).get_return() == 7  # fmt: skip


@pytest.mark.parametrize(
    ("given", "where"),
    [
        (
            {"observations": [0, 1], "actions": [0, 1], "rewards": [0]},
            "column 'actions': expected 1 items",
        ),
        ({"observations": [0], "infos": [{}, {}]}, "as many infos as observations"),
        ({"observations": [0, 1], "actions": [0], "rewards": [0], "extra_model_outputs": {"x": []}}, "'x'"),
        ({"observations": [0], "len_lookback_buffer": -1}, "at least 0"),
        ({"rewards": [1.0], "actions": [1]}, "got 0 observations and 1 rewards"),
    ],
)
def test_data_of_inconsistent_lengths_is_refused_naming_the_column(given: dict[str, Any], where: str) -> None:
    with pytest.raises(ValueError, match=where):
        SingleAgentEpisode("e", **given)


def test_a_step_needs_a_reset_and_a_chunk_none() -> None:
    episode = SingleAgentEpisode("e")
    with pytest.raises(RuntimeError, match="'e': expected add_env_reset before"):
        episode.add_env_step(0, 0, 0)
    for begun in (grown(2).cut(), SingleAgentEpisode(terminated=True)):
        with pytest.raises(RuntimeError, match="expected an empty episode"):
            begun.add_env_reset(0)


def test_an_extra_output_that_comes_late_or_not_is_refused_at_that_step() -> None:
    episode = grown(2)
    for outputs in (None, {}, {"logp": 1}, {"logp": 1, "state_out": {}, "more": 1}):
        with pytest.raises(ValueError, match=r"are missing at step 2|came too late at step 2"):
            episode.add_env_step(2, 2, 1.0, extra_model_outputs=outputs)
    assert len(episode) == 2
    # A continuation without lookback has no steps yet, and may have other columns.
    chunk = episode.cut(0)
    chunk.add_env_step(3, 3, 1.0, extra_model_outputs={"other": 1})
    chunk.validate()
    assert list(chunk.extra_model_outputs) == ["other"]


def test_a_step_that_does_not_fit_an_array_episode_leaves_it_as_it_was() -> None:
    episode = grown(3).to_numpy()
    before = facts(episode)
    outputs = {"logp": 0, "state_out": {"h": np.zeros(2, int)}}
    bad = {"logp": 0, "state_out": {"h": np.zeros(5)}}
    for step, column in (
        ((np.zeros(2), 1, 1.0, outputs), "observations"),
        ((4, [1, 2], 1.0, outputs), "actions"),
        ((4, 1, [1.0], outputs), "rewards"),
        ((4, 1, 1.0, bad), "state_out"),
    ):
        with pytest.raises(ValueError, match=f"Episode 'e', column '{column}': expected"):
            episode.add_env_step(*step[:3], extra_model_outputs=step[3])
        episode.validate()
        assert facts(episode) == before
    episode.add_env_step(4, 1, 1.0, extra_model_outputs=outputs)
    assert (len(episode), episode.is_numpy) == (4, True)


def test_rewards_may_be_numbers_of_any_kind_and_arrays_of_one_element() -> None:
    episode = SingleAgentEpisode()
    episode.add_env_reset(0)
    rewards = [1, 2.0, True, np.float32(3), np.int8(4), np.array(5.0), np.array([6.0]), np.array([[7]])]
    for reward in rewards:
        episode.add_env_step(1, 0, reward)
    observations, actions = [0] * 9, [0] * 8
    twins = [
        SingleAgentEpisode(observations=observations, actions=actions, rewards=given, len_lookback_buffer=0)
        for given in (rewards, np.arange(1.0, 9)[:, None], InfiniteLookbackBuffer(rewards))
    ]
    twins[1].set_rewards(new_data=iter(rewards))
    twins[2].set_rewards(new_data=np.array([[6.0]]), at_indices=6)
    for each in (episode, *twins):
        assert each.get_return() == 1 + 2 + 1 + 3 + 4 + 5 + 6 + 7
        assert each.to_numpy().get_rewards().tolist() == [1, 2, 1, 3, 4, 5, 6, 7]
        assert EpisodeBatch.from_episodes([each]).get_returns().tolist() == [29]


def test_infos_that_are_no_dicts_stay_in_batches_and_are_left_out_on_the_wire() -> None:
    episodes = [SingleAgentEpisode("a"), SingleAgentEpisode("b")]
    for episode, infos in zip(episodes, [("", 0, "x"), ({}, {"k": 1}, Token(1))], strict=True):
        episode.add_env_reset(0.0, infos[0])
        episode.add_env_step(1.0, 0, 1.0, infos[1])
        episode.add_env_step(2.0, 0, 1.0, infos[2])
    batch = EpisodeBatch.from_episodes(episodes)
    assert [batch[0].get_infos(), batch[1].get_infos()] == [["", 0, "x"], [{}, {"k": 1}, Token(1)]]
    received = EpisodeBatch.from_wire(*batch.to_wire())
    assert [received[0].get_infos(), received[1].get_infos()] == [[{}, {}, {}], [{}, {"k": 1}, {}]]
    assert received.meta["num_infos_left_out"] == 4


# -- facts --------------------------------------------------------------------------------------------


def test_getters_name_the_episode_and_column_in_their_errors() -> None:
    episode = grown(2)
    with pytest.raises(IndexError, match="column 'rewards': index 2"):
        episode.get_rewards(2)
    with pytest.raises(KeyError, match="Did you mean 'logp'"):
        episode.get_extra_model_outputs("lopg")
    with pytest.raises(ValueError, match="column 'observations': one_hot_discrete"):
        episode.get_observations(0, one_hot_discrete=True)
    episode.add_env_step(
        np.zeros(4), 1, 1.0, extra_model_outputs={"logp": 1, "state_out": {"h": np.zeros(2)}}
    )
    with pytest.raises(ValueError, match=r"item 3 has shape \(4,\)"):
        episode.to_numpy()


def test_setting_a_space_changes_one_hots_and_fillers() -> None:
    episode = grown(2)
    episode.observation_space = gym.spaces.Discrete(3)
    assert episode.get_observations(1, one_hot_discrete=True).tolist() == [0, 1, 0]
    episode.action_space = gym.spaces.Discrete(2, start=10)
    assert episode.get_actions(1, one_hot_discrete=True).tolist() == [0, 1]
    assert (episode.cut().observation_space, episode[:1].action_space) == (
        episode.observation_space,
        episode.action_space,
    )


def test_get_data_dict_has_one_item_per_step() -> None:
    chunk = grown(5, terminated=True).slice(slice(2, None), len_lookback_buffer=1)
    for expected in (list, np.ndarray):
        data = chunk.get_data_dict()
        assert type(data[Columns.OBS]) is expected
        listed = {key: np.asarray(value).tolist() for key, value in data.items() if key != "state_out"}
        assert listed == {
            "obs": [2, 3, 4],
            "infos": [{"t": 1}, {"t": 2}, {"t": 3}],
            "actions": [12, 13, 14],
            "rewards": [2.5, 3.5, 4.5],
            "t": [2, 3, 4],
            "eps_id": ["e"] * 3,
            "terminateds": [False, False, True],
            "truncateds": [False] * 3,
            "logp": [-2, -3, -4],
        }
        chunk.to_numpy()
    empty = grown(2).cut().get_data_dict()
    assert (empty["obs"], empty["terminateds"]) == ([], [])


def test_durations_add_up_over_chunks() -> None:
    episode = grown(3)
    head = episode.get_duration_s()
    assert head > 0
    chunk = episode.cut()
    assert chunk.get_duration_s() == 0
    chunk.add_env_step(4, 1, 1.0, extra_model_outputs={"logp": 1, "state_out": {"h": np.zeros(2)}})
    assert chunk.get_duration_s() > 0
    whole = head + chunk.get_duration_s()
    episode.concat_episode(chunk)
    assert episode.get_duration_s() == pytest.approx(whole)
    assert repr(episode) == "SingleAgentEpisode(id_='e', len=4, t=4, done=False, return=5.5)"


# -- chunks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: grown(2), worked], ids=["of one agent", "of several"])
def test_custom_data_is_deep_copied_by_cut_and_updated_by_concat(make: Any) -> None:
    episode = make()
    episode.custom_data["list"] = [1]
    chunk = episode.cut()
    chunk.custom_data["list"].append(2)
    chunk.custom_data["new"] = 3
    assert episode.custom_data == {"list": [1]}
    assert episode[:1].custom_data == {"list": [1]}
    episode.concat_episode(chunk)
    assert episode.custom_data == {"list": [1, 2], "new": 3}


def test_chunks_that_do_not_continue_each_other_are_refused() -> None:
    def continuation(**changes: Any) -> SingleAgentEpisode:
        chunk = grown(2).cut()
        chunk.add_env_step(3, 12, 2.5, extra_model_outputs=changes.pop("outputs", None))
        for name, value in changes.items():
            setattr(chunk, name, value)
        return chunk

    episode = grown(2)
    before = facts(episode)
    other_observation = continuation()
    other_observation.set_observations(new_data=99, at_indices=0)
    for chunk, expected in (
        (continuation(id_="f"), "same id_, got 'f'"),
        (continuation(t_started=5), "t_started=2, got t_started=5"),
        (other_observation, "first observation to equal"),
        (continuation(), r"extra model outputs \['logp', 'state_out'\], got \[\]"),
        (SingleAgentEpisode("e", t_started=2), "at least one observation"),
    ):
        with pytest.raises(ValueError, match=f"expected .*{expected}"):
            episode.concat_episode(chunk)
        assert facts(episode) == before
    with pytest.raises(ValueError, match="this episode to be ongoing"):
        grown(2, terminated=True).concat_episode(continuation())


def test_chunks_know_the_module_state_before_their_first_step_without_lookback() -> None:
    episode = grown(4)
    episode.initial_state = {"h": np.full(2, -1)}
    for chunk, value in (
        (episode.cut(0), 3),
        (episode.cut(2), 3),
        (episode[2:], 1),
        (episode[:2], -1),
        (episode.cut(2).cut(0), 3),
        (episode.cut(0).cut(0), 3),
    ):
        assert chunk.initial_state["h"].tolist() == [value] * 2
    assert grown(2)[:1].initial_state is None


# -- state --------------------------------------------------------------------------------------------


def test_state_and_copies_keep_ids_spaces_and_durations() -> None:
    spaces = {
        "observation_space": gym.spaces.Dict({"x": gym.spaces.Box(-1, 1, (2,)), "y": gym.spaces.Discrete(3)}),
        "action_space": gym.spaces.Tuple([gym.spaces.Discrete(2), gym.spaces.MultiDiscrete([2, 2])]),
    }
    ids = {"agent_id": "a", "module_id": "m", "multi_agent_episode_id": "me"}
    episode = SingleAgentEpisode("e", t_started=3, **spaces, **ids)
    episode.add_env_reset({"x": np.zeros(2, np.float32), "y": 1}, {"array": np.arange(3), "odd": (1, None)})
    episode.custom_data = {"k": {1: [np.float64(2.0)]}}
    episode.initial_state = {"c": (np.zeros(2), np.ones(2))}
    for twin in (
        SingleAgentEpisode.from_state(pickle.loads(pickle.dumps(episode.get_state()))),
        copy.deepcopy(episode),
        pickle.loads(pickle.dumps(episode)),
    ):
        assert facts(twin) == facts(episode)
        assert {name: getattr(twin, name) for name in (*spaces, *ids)} == {**spaces, **ids}
        assert twin.get_infos(0)["odd"] == (1, None)
        assert twin.get_duration_s() == episode.get_duration_s()


def test_a_wrong_state_is_refused() -> None:
    state = grown(2).get_state()
    for change in ({"t": 7}, {"rewards": {}}, {"infos": [{}]}):
        with pytest.raises(ValueError, match="expected"):
            SingleAgentEpisode.from_state({**state, **change})
    with pytest.raises(ValueError, match=state["id_"]):
        SingleAgentEpisode.from_state({**state, "rewards": {"data": [1.0], "lookback": 0}})
    del state["actions"]
    with pytest.raises(ValueError, match="expected a SingleAgentEpisode's state"):
        SingleAgentEpisode.from_state(state)


DATA = [10, 11, 12, 13, 14]


def plain(found: Any) -> Any:
    return np.asarray(found).tolist()


def test_array_buffers_check_shapes_and_widen_dtypes_when_written_to() -> None:
    buffer = InfiniteLookbackBuffer(np.zeros((3, 2), np.uint8))
    buffer[0] = np.array([300, 1])
    assert buffer.get(0).tolist() == [300, 1]
    buffer.append(np.array([0.5, 0.5], np.float32))
    assert buffer.get(-1).tolist() == [0.5, 0.5]
    assert buffer.get(0).tolist() == [300, 1]
    for item in (np.zeros(3), 1.0, {"a": np.zeros(2)}):
        with pytest.raises(ValueError, match="expected"):
            buffer.append(item)
        with pytest.raises(ValueError, match="expected"):
            buffer[0] = item
    assert len(buffer) == 4
    rewards = InfiniteLookbackBuffer(np.zeros(2, np.float32))
    rewards.append(1)
    rewards[:] = [1, 2, 3]
    assert rewards.data.dtype == np.float32


@pytest.mark.parametrize("bad", ["oops", None, object(), b"x"])
def test_array_buffers_refuse_items_of_another_kind(bad: Any) -> None:
    buffer = InfiniteLookbackBuffer(np.zeros(3, np.float32), 1)
    for write in (
        lambda: buffer.append(bad),
        lambda: buffer.extend([bad]),
        lambda: buffer.extend(np.array([bad])),
        lambda: buffer.set(bad, at_indices=0),
        lambda: buffer.set([bad, bad]),
        lambda: buffer.set(np.array([bad]), at_indices=[0]),
        lambda: buffer + InfiniteLookbackBuffer([1.0, bad]),
    ):
        with pytest.raises(ValueError, match=r"expected|can't be a column"):
            write()
    assert (buffer.data.dtype, buffer.data.tolist()) == (np.float32, [0, 0, 0])


def test_columns_of_strings_refuse_numbers_and_grow_with_longer_strings() -> None:
    buffer = InfiniteLookbackBuffer(["a", "b"])
    buffer.finalize()
    with pytest.raises(ValueError, match=r"expected a string .* got a number"):
        buffer.append(5)
    buffer.append("long")
    buffer[0] = "longer"
    assert buffer.data.tolist() == ["longer", "b", "long"]
    buffer.set([1, 2, 3])  # all at once
    assert buffer.data.tolist() == [1, 2, 3]
    empty = InfiniteLookbackBuffer(np.zeros(0, np.float32))
    empty.append("a")
    assert empty.data.tolist() == ["a"]


def test_an_unpickled_buffer_whose_memory_is_read_only_can_be_written_to() -> None:
    frames: list[pickle.PickleBuffer] = []
    raw = pickle.dumps(InfiniteLookbackBuffer(np.arange(3)), 5, buffer_callback=frames.append)
    buffer = pickle.loads(raw, buffers=[bytes(frame.raw()) for frame in frames])
    buffer[0] = 5
    assert buffer.data.tolist() == [5, 1, 2]


@pytest.mark.parametrize("kind", [list, np.array])
def test_growing_popping_and_adding(kind: Any) -> None:
    def make(data: list[int], lookback: int) -> InfiniteLookbackBuffer:
        return InfiniteLookbackBuffer(kind(data), lookback)

    buffer = make(DATA, 2)
    buffer.append(15)
    buffer.extend([16, 17])
    buffer.extend(np.array([18]))
    buffer.concat(make([1, 19], 1))
    assert plain(buffer.data) == [*DATA, 15, 16, 17, 18, 19]
    assert buffer.pop() == 19
    assert buffer.pop(0) == 12
    assert (buffer.pop(-8), buffer.lookback) == (10, 1)
    assert plain(buffer.data) == [11, 13, 14, 15, 16, 17, 18]
    total = buffer + make([0, 99], 1)
    assert plain(total.data) == [11, 13, 14, 15, 16, 17, 18, 99]
    assert (total.lookback, plain(total)) == (1, [13, 14, 15, 16, 17, 18, 99])
    assert plain(buffer.data) == [11, 13, 14, 15, 16, 17, 18]
    with pytest.raises(IndexError):
        buffer.pop(50)
    with pytest.raises(IndexError):
        InfiniteLookbackBuffer().pop()
