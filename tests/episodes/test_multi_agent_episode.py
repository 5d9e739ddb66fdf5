"""MultiAgentEpisode: worked examples, rules of done agents, chunks, getters and errors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import gymnasium as gym
import pytest

from rlzmq.core.errors import MultiAgentEnvError
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from tests.episodes.multi_agent_model import facts, plain

OBSERVATIONS: list[Any] = [{"a": 0, "b": 100}, {"a": 1}, {"a": 2}, {"b": 101, "a": 3}, {"c": 200, "a": 4}]
ACTIONS: list[Any] = [{"a": 10, "b": 20}, {"a": 11}, {"a": 12}, {"a": 13, "b": 21}]
REWARDS: list[Any] = [{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1, "b": 4}, {"a": 1, "b": 7, "c": 5}]
OUTPUTS: list[Any] = [
    {"a": {"l": 1}, "b": {"l": 2}},
    {"a": {"l": 3}},
    {"a": {"l": 4}},
    {"a": {"l": 5}, "b": {"l": 6}},
]


def worked() -> MultiAgentEpisode:
    """Agent b acts at env step 0 and hears nothing more."""
    episode = MultiAgentEpisode()
    episode.add_env_reset(observations={"a": 0, "b": 100})
    episode.add_env_step({"a": 1}, {"a": 10, "b": 20}, {"a": 1, "b": 2})
    episode.add_env_step({"a": 2}, {"a": 11}, {"a": 1, "b": 3})
    return episode


def given() -> MultiAgentEpisode:
    return MultiAgentEpisode(
        observations=OBSERVATIONS,
        actions=ACTIONS,
        rewards=REWARDS,
        extra_model_outputs=OUTPUTS,
        len_lookback_buffer=0,
    )


def test_getters_of_a_worked_example_with_a_hanging_agent() -> None:
    episode = worked()
    assert {agent_id: list(agent_ts) for agent_id, agent_ts in episode.env_t_to_agent_t.items()} == {
        "a": [0, 1, 2],
        "b": [0, MultiAgentEpisode.SKIP_ENV_TS_TAG, "S"],
    }
    assert episode.get_observations(-1) == {"a": 2}
    assert episode.get_observations(-1, env_steps=False) == {"a": 2, "b": 100}
    assert episode.get_actions() == {"a": [10, 11], "b": [20]}
    assert episode.get_actions(env_steps=False) == {"a": [10, 11]}
    assert episode.get_actions(-1, env_steps=False) == {"a": 11, "b": 20}
    assert episode.get_rewards(env_steps=False) == {"a": [1, 1]}
    assert episode.get_return(include_hanging_rewards=True) == 7
    chunk = episode.cut(1)
    chunk.add_env_step({"b": 101, "a": 3}, {"a": 12}, {"b": 4, "a": 1})
    assert chunk.get_rewards(env_steps=False) == {"a": [1], "b": [9]}
    assert chunk.get_actions(env_steps=False) == {"a": [12], "b": [20]}
    assert chunk.get_return() == 10


def test_ids_of_agents_may_be_tuples() -> None:
    episode = MultiAgentEpisode()
    episode.add_env_reset(observations={("x", 1): 5, 2: 6})
    assert episode.get_observations(0, agent_ids=("x", 1)) == {("x", 1): 5}
    assert episode.get_observations(0, agent_ids=[("x", 1), 2]) == {("x", 1): 5, 2: 6}


def test_regression_extra_model_outputs_without_a_key_are_all_of_them() -> None:
    episode = given()
    assert episode.get_extra_model_outputs() == {"a": {"l": [1, 3, 4, 5]}, "b": {"l": [2, 6]}}
    filled = episode.get_extra_model_outputs("l", slice(2, 5), fill=0)
    assert filled == {"a": [4, 5, 0], "b": [0, 6, 0], "c": [0, 0, 0]}
    assert episode.get_extra_model_outputs(return_list=True)[1] == {"a": {"l": 3}}
    with pytest.raises(KeyError, match="known"):
        episode.get_extra_model_outputs("x")


# -- refused steps -------------------------------------------------------------------------------------


STEP: dict[str, Any] = {
    "observations": {"a": 1, "b": 101},
    "actions": {"a": 10, "b": 20},
    "rewards": {"a": 1.0, "b": 2.0},
    "extra_model_outputs": {"a": {"l": 1}, "b": {"l": 2}},
}


@pytest.mark.parametrize("is_chunk", [False, True])
def test_a_step_of_wrong_values_names_the_agent_and_changes_nothing(is_chunk: bool) -> None:
    episode = MultiAgentEpisode()
    episode.add_env_reset(observations={"a": 0, "b": 100})
    episode = episode.cut(0) if is_chunk else episode
    before = facts(episode)
    with pytest.raises(MultiAgentEnvError, match="env step 1, agent 'b'"):
        episode.add_env_step(**{**STEP, "extra_model_outputs": {"a": {"l": 1}, "b": 5}})
    assert facts(episode) == before
    episode.add_env_step(**STEP)
    assert episode.get_return() == 3
    episode.validate()


def test_an_error_of_the_mapping_function_changes_nothing() -> None:
    def fn(agent_id: Any, episode: Any) -> str:
        return {"a": "m", "b": "m"}[agent_id]

    episode = MultiAgentEpisode(agent_to_module_mapping_fn=fn)
    before = facts(episode)
    with pytest.raises(KeyError, match="c"):
        episode.add_env_reset(observations={"a": 0, "c": 1})
    assert {**facts(episode), "agent_module_ids": {}} == {**before, "agent_module_ids": {}}
    episode.add_env_reset(observations={"a": 0, "b": 100})
    episode.add_env_step({}, {"a": 10}, {"a": 2, "c": 3})
    before = facts(episode)
    with pytest.raises(KeyError, match="c"):
        episode.add_env_step({"a": 1, "c": 5}, {}, {"c": 1}, terminateds={"b": True})
    episode.validate()
    assert facts(episode) == before
    assert episode.get_actions(0) == {"a": 10}
    with pytest.raises(KeyError):
        episode.get_extra_model_outputs("l")


def test_items_of_any_kind_are_kept_and_numbers_asked_for_where_they_are_needed() -> None:
    episode = MultiAgentEpisode("e")
    episode.add_env_reset(observations={"a": "obs_0", "b": {1}}, infos={"a": "info_0"})
    episode.add_env_step(
        {"a": "obs_1"}, {"a": "act_0", "b": frozenset()}, {"a": "rew_0", "b": "hanging"}, {"a": 5}
    )
    assert episode.get_rewards() == {"a": ["rew_0"], "b": ["hanging"]}
    assert episode.get_infos(agent_ids="a") == {"a": ["info_0", 5]}
    for twin in (MultiAgentEpisode.from_state(episode.get_state()), pickle.loads(pickle.dumps(episode))):
        assert twin.get_actions() == {"a": ["act_0"], "b": [frozenset()]}
        assert twin.get_rewards(0) == {"a": "rew_0", "b": "hanging"}
    refused = "column 'rewards': item 0: expected a reward that is one number, got str 'rew_0'"
    with pytest.raises(ValueError, match=f"Episode 'e_a', {refused}"):
        episode.get_return()
    with pytest.raises(ValueError, match=r"column 'rewards': .*'(rew_0|hanging)'"):
        EpisodeBatch.from_episodes([episode])
    before = facts(episode)
    with pytest.raises(MultiAgentEnvError, match="agent 'b', column 'rewards'"):
        episode.add_env_step({"b": {2}}, {}, {"b": 1.0})
    assert facts(episode) == before
    chunk = episode.cut()
    chunk.add_env_step({"b": {2}}, {}, {})
    assert chunk.get_rewards(-1) == {}
    assert chunk.get_rewards(agent_ids="b", env_steps=False) == {"b": ["hanging"]}
    assert list(chunk.to_numpy().get_observations(agent_ids="b", env_steps=False)["b"]) == [{1}, {2}]


# -- as RLlib has it -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["terminateds", "truncateds"])
def test_a_slice_keeps_the_ends_that_an_episode_was_made_with(name: str) -> None:
    """Agent b observes at env steps 0 and 1 and does not act on the latter."""
    episode = MultiAgentEpisode(
        observations=[{"a": 0, "b": 0}, {"a": 1, "b": 1}, {"a": 2}],
        actions=[{"a": 0, "b": 0}, {"a": 1}],
        rewards=[{"a": 0.1, "b": 1}, {"a": 0.2}],
        len_lookback_buffer=0,
        **{name: {"b": True}},
    )
    for part in (episode, episode[:], episode[:1], episode[:-1]):
        assert getattr(part, f"get_{name}")() == {"a": False, "b": True, "__all__": False}
        assert (part.agent_episodes["b"].is_done, part.is_done) == (True, False)
    assert episode[1:].agent_ids == {"a"}
    with pytest.raises(MultiAgentEnvError, match="agent 'b' is done already"):
        episode[1:].add_env_step({"a": 3, "b": 3}, {"a": 2}, {"a": 1})
    whole = episode[:1]
    whole.concat_episode(episode[1:])
    assert facts(whole) == facts(episode)


@pytest.mark.parametrize("as_batch", [False, True])
def test_an_agent_that_came_behind_a_slices_end_may_join_the_slice(as_batch: bool) -> None:
    episode = MultiAgentEpisode()
    episode.add_env_reset(observations={"a": 0})
    episode.add_env_step({"a": 1}, {"a": 0}, {"a": 0})
    episode.add_env_step({"a": 2, "b": 7, "c": 8}, {"a": 1}, {"a": 0}, terminateds={"c": True})  # c at once
    episode.add_env_step({"a": 3, "b": 8}, {"a": 2, "b": 1}, {"a": 0, "b": 1}, terminateds={"b": True})
    episode.add_env_step({"a": 4}, {"a": 3}, {"a": 0})
    part, rest = episode[:1], episode[3:]
    if as_batch:
        head, tail = EpisodeBatch.from_episodes([episode]).split(1)
        part, rest = head[0], tail.split(2)[1][0]
    assert part.agent_ids == {"a"}
    part.add_env_step({"a": 9, "b": 5, "c": 6}, {"a": 0}, {"a": 0})
    assert part.get_agents_to_act() == {"a", "b", "c"}
    for agent_id in ("b", "c"):
        with pytest.raises(MultiAgentEnvError, match=f"agent '{agent_id}' is done already"):
            rest.add_env_step({"a": 5, agent_id: 5}, {"a": 0}, {"a": 0})


# -- constructor, slices, joining ----------------------------------------------------------------------


def test_inconsistent_lists_are_refused() -> None:
    with pytest.raises(ValueError, match="4 env steps"):
        MultiAgentEpisode(observations=OBSERVATIONS, actions=ACTIONS[:2], rewards=REWARDS)
    with pytest.raises(ValueError, match="expected observations"):
        MultiAgentEpisode(actions=ACTIONS, rewards=REWARDS)
    with pytest.raises(ValueError, match="plus the reset"):
        MultiAgentEpisode(observations=OBSERVATIONS, actions=ACTIONS[:3], rewards=REWARDS[:3])


def test_chunks_that_do_not_fit_are_refused() -> None:
    episode = worked()
    chunk = episode.cut()
    with pytest.raises(ValueError, match="same episode"):
        worked().concat_episode(chunk)
    chunk.add_env_step({"a": 3}, {"a": 12}, {"a": 1})
    with pytest.raises(ValueError, match="starts at env step 3"):
        chunk.concat_episode(chunk)


# -- getters and setters ---------------------------------------------------------------------------------


def test_one_hot_needs_and_uses_the_agents_spaces() -> None:
    spaces = gym.spaces.Dict(a=gym.spaces.Discrete(3))
    episode = MultiAgentEpisode(observation_space=spaces, action_space=spaces)
    episode.add_env_reset(observations={"a": 1})
    episode.add_env_step({}, {"a": 2}, {})
    assert episode.get_observations(0, one_hot_discrete=True)["a"].tolist() == [0, 1, 0]
    assert episode.get_actions(0, one_hot_discrete=True)["a"].tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match="space"):
        worked().get_observations(0, one_hot_discrete=True)


def test_setters_write_agent_steps_and_know_their_agents() -> None:
    episode = given()
    episode.set_observations(new_data={"a": 7}, at_indices=-1)
    episode.set_actions(new_data={"b": 77}, at_indices=-1)
    episode.set_rewards(new_data={"a": [1, 2, 3, 4], "b": [9]})
    episode.set_extra_model_outputs(key="l", new_data={"a": [8, 8]}, at_indices=slice(0, 2))
    assert episode.get_observations(-1) == {"a": 7, "c": 200}
    assert episode.get_actions() == {"a": [10, 11, 12, 13], "b": [77, 21]}
    assert episode.get_rewards() == {"a": [1, 2, 3, 4], "b": [9, 7]}
    assert episode.get_extra_model_outputs("l")["a"] == [8, 8, 4, 5]
    with pytest.raises(KeyError, match="zz"):
        episode.set_rewards(new_data={"a": [0, 0, 0, 0], "zz": [1]})
    assert episode.get_rewards()["a"] == [1, 2, 3, 4]
    with pytest.raises(IndexError):
        episode.set_rewards(new_data={"a": [1, 2]})


def test_getters_name_the_episode_the_agent_and_the_column_in_their_errors() -> None:
    episode = worked()
    where = f"^episode {episode.id_}"
    for kind, text, call in (
        (IndexError, "column 'rewards': index 5", lambda: episode.get_rewards(5)),
        (IndexError, "agent 'b', column 'rewards': index 1", lambda: episode.get_rewards(1, env_steps=False)),
        (ValueError, "agent 'a', column 'actions'", lambda: episode.get_actions(-1, one_hot_discrete=True)),
        (TypeError, "column 'observations': expected an index", lambda: episode.get_observations("x")),
    ):
        with pytest.raises(kind, match=f"{where}, {text}"):
            call()
    with pytest.raises(KeyError, match="no agent has the extra model output 'x'"):
        episode.get_extra_model_outputs("x")


@pytest.mark.parametrize("as_numpy", [False, True])
@pytest.mark.parametrize(
    ("column", "new_data", "at_indices", "kind"),
    [
        ("rewards", {"a": 3, "b": 4, "c": 5}, 0, IndexError),
        ("rewards", {"a": [5.5] * 4, "b": [1, 2]}, None, IndexError),
        ("rewards", {"a": [7] * 4, "b": ["x", "y"]}, None, IndexError),
        ("actions", {"b": [7, 8], "a": [0]}, slice(0, 2), IndexError),
        ("observations", {"a": [9, 9], "b": [8, 8], "c": [1, 2]}, [0, -2], IndexError),
        ("extra_model_outputs", {"a": 1, "c": 1}, -1, KeyError),
    ],
)
def test_setters_write_all_agents_data_or_none(
    as_numpy: bool, column: str, new_data: Any, at_indices: Any, kind: Any
) -> None:
    episode = given()
    if as_numpy:
        episode.to_numpy()
    before = episode.get_extra_model_outputs(), episode.get_actions(), episode.get_rewards()
    before = copy.deepcopy((*before, episode.get_observations()))
    key = {"key": "l"} if column == "extra_model_outputs" else {}
    with pytest.raises(kind, match=r"Episode '.*_[abc]'"):
        getattr(episode, f"set_{column}")(new_data=new_data, at_indices=at_indices, **key)
    after = episode.get_extra_model_outputs(), episode.get_actions(), episode.get_rewards()
    assert plain([*after, episode.get_observations()]) == plain(list(before))


def test_resetting_twice_is_refused_and_printing_works(capsys: pytest.CaptureFixture[str]) -> None:
    episode = worked()
    with pytest.raises(ValueError, match="empty episode"):
        episode.add_env_reset(observations={"a": 0})
    episode.print()
    assert capsys.readouterr().out.splitlines()[2].split() == ["b", "x"]
    assert "len=2" in repr(episode)
