"""Fragments that would spoil an update are refused with the column's name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlzmq.core.spaces import space_to_plain
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.protocol.core import DecodeShard
from rlzmq.roles.learner_link import BatchCheck, LearnerLink
from rlzmq.wire.messages import Fragment, Shard
from rlzmq.wire.payloads import encode_fragment


def batch_of(size: int = 4, reward: float = 1.0, **extras: Any) -> EpisodeBatch:
    episode = SingleAgentEpisode(observation_space=gym.spaces.Box(-1, 1, (4,), np.float32))
    episode.add_env_reset(np.zeros(size, np.float32))
    for _ in range(3):
        episode.add_env_step(np.zeros(size, np.float32), 1, reward, extra_model_outputs=extras or None)
    batch = EpisodeBatch.from_episodes([episode])
    batch.observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    return batch


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=f"column 'rewards' holds {value} at step 1"):
        BatchCheck().check(batch_of(reward=value))


LOGITS = {"logits": np.zeros((2, 2), np.float32)}


@pytest.mark.parametrize(
    "wrong", [np.zeros(3, np.float32), np.zeros(2, np.int64), {"a": np.zeros(2, np.float32)}]
)
def test_no_number_of_fragments_redefines_what_the_module_puts_out(wrong: Any) -> None:
    check = BatchCheck()
    check.expect({}, None, {"default_policy": LOGITS})
    for seq in range(20):
        with pytest.raises(ValueError, match=r"logits.*; the module's own outputs define it$"):
            check.check(batch_of(logits=wrong), f"a/1/{seq}")
    check.check(batch_of(logits=np.zeros(2, np.float32)), "b/1/0")
    check.trained()
    with pytest.raises(ValueError, match="logits"):
        check.check(batch_of(logits=wrong), "a/1/99")


def test_fragments_without_the_modules_outputs_give_way_to_one_with_them() -> None:
    check = BatchCheck()
    check.expect({}, None, {"default_policy": LOGITS})
    for seq in range(20):
        check.check(batch_of(), f"a/1/{seq}")  # a custom piece may have removed it
    good = batch_of(logits=np.zeros(2, np.float32))
    check.check(good, "b/1/0")
    assert check.num_replaced == 1
    for seq in range(20):
        with pytest.raises(ValueError, match=r"expected the columns .*'logits'"):
            check.check(batch_of(), f"a/1/{50 + seq}")
    assert check.misfit(good) == ""


def test_one_odd_fragment_before_the_first_update_does_not_get_all_others_refused() -> None:
    """Its observations are as they should be, and no space knows of the extra column."""
    odd, usual = {"extra": np.zeros(3, np.float32)}, {"extra": np.zeros(2, np.float32)}
    check = BatchCheck()
    check.check(batch_of(**odd), "a/1/0")
    for _ in range(3):
        check.check(batch_of(**odd), "a/1/0")  # planned again: it counts once
    with pytest.raises(ValueError, match="'extra'"):
        check.check(batch_of(**usual), "b/1/0")
    check.check(batch_of(**usual), "b/1/1")
    assert check.num_replaced == 1
    assert "'extra'" in check.misfit(batch_of(**odd))
    assert check.misfit(batch_of(**usual)) == ""
    with pytest.raises(ValueError, match="'extra'"):
        check.check(batch_of(**odd), "a/1/1")


SPACES: dict[str, tuple[Any, Any, Any]] = {
    "Discrete": (gym.spaces.Discrete(3, start=1), 3, 0),
    "MultiDiscrete": (gym.spaces.MultiDiscrete([2, 5]), [1, 4], [2, 0]),
    "MultiBinary": (gym.spaces.MultiBinary(2), [1, 1], [0, -1]),
    "within Dict and Tuple": (
        gym.spaces.Dict({"a": gym.spaces.Tuple([gym.spaces.Box(-1, 1), gym.spaces.Discrete(2)])}),
        {"a": (np.zeros(1, np.float32), 1)},
        {"a": (np.zeros(1, np.float32), 10**6)},
    ),
}


def episode_of(observations: list[Any], actions: list[Any]) -> SingleAgentEpisode:
    episode = SingleAgentEpisode()
    episode.add_env_reset(observations[0])
    for observation, action in zip(observations[1:], actions, strict=True):
        episode.add_env_step(observation, action, 1.0)
    return episode


@pytest.mark.parametrize("name", SPACES)
def test_values_outside_of_their_spaces_are_refused(name: str) -> None:
    space, good, bad = SPACES[name]
    check = BatchCheck()
    check.expect({"default_policy": space}, space)
    check.check(EpisodeBatch.from_episodes([episode_of([good] * 3, [good] * 2)]))
    for column, episode in (
        ("actions", episode_of([good] * 3, [good, bad])),
        ("obs", episode_of([good, good, bad], [good] * 2)),  # the one after the last step
    ):
        with pytest.raises(ValueError, match=f"column '{column}'.*expected values of "):
            check.check(EpisodeBatch.from_episodes([episode_of([good] * 3, [good] * 2), episode]))
    lookback = episode_of([good, good, bad, good], [bad, good, good]).cut(2)
    assert len(lookback) == 0
    with pytest.raises(ValueError, match="expected values of"):
        check.check(EpisodeBatch.from_episodes([lookback]))


@pytest.mark.parametrize(
    ("observation", "action", "text"),
    [
        (np.zeros(3, np.float32), 1, r"^column 'obs': expected shape \(4,\) per step of Box.*, got \(3,\)$"),
        ({"a": np.zeros(4, np.float32)}, 1, r"^column 'obs': expected numbers of Box.*, got none$"),
        (
            np.zeros(4, np.float32),
            [1, 0],
            r"^column 'actions': expected shape \(\) per step of .*, got \(2,\)$",
        ),
    ],
)
def test_the_runs_spaces_define_the_form_not_the_first_fragment(
    observation: Any, action: Any, text: str
) -> None:
    check = BatchCheck()
    check.expect({"default_policy": gym.spaces.Discrete(2)}, gym.spaces.Box(-1, 1, (4,), np.float32))
    with pytest.raises(ValueError, match=text):
        check.check(EpisodeBatch.from_episodes([episode_of([observation] * 2, [np.asarray(action)])]))
    check.check(EpisodeBatch.from_episodes([episode_of([np.zeros(4, np.float32)] * 2, [1])]))


def test_agents_have_spaces_of_their_own() -> None:
    def batch(observation: int, action: int) -> EpisodeBatch:
        episode = MultiAgentEpisode(agent_to_module_mapping_fn=lambda agent_id, _: f"of_{agent_id}")
        episode.add_env_reset(observations={"a": 0, "b": observation})
        agents = {"a": 0, "b": 1}
        episode.add_env_step(agents, {"a": 1, "b": action}, dict.fromkeys(agents, 0.0))
        return EpisodeBatch.from_episodes([episode])

    check = BatchCheck()
    small, large = gym.spaces.Discrete(2), gym.spaces.Discrete(10)
    check.expect({"of_a": small, "of_b": large}, gym.spaces.Dict({"a": small, "b": large}))
    check.check(batch(9, 9))
    for column, wrong in (("obs", batch(10, 9)), ("actions", batch(9, 10))):
        with pytest.raises(ValueError, match=rf"'{column}': expected values of Discrete\(10\), got 10"):
            check.check(wrong)


def link_of_learner(events: list[Any]) -> LearnerLink:
    learner = SimpleNamespace(module={"default_policy": SimpleNamespace(action_space=gym.spaces.Discrete(2))})
    observations = space_to_plain(gym.spaces.Discrete(4))
    run_id, name, address = "run", "learner-0", "ipc:///nowhere"
    link = LearnerLink(
        learner, print, run_id=run_id, name=name, data_address=address, observation_space=observations
    )
    link.change_layout(None)

    held: dict[int, Any] = {}

    def refuse(shard: Shard, reason: str, detail: str) -> list[Any]:
        held.pop(shard.index, None)
        events.append((shard.index, detail))
        return []

    def take(shard: Shard, data: Any, now: float) -> list[Any]:
        held[shard.index] = shard, data
        events.append((shard.index, None))
        return []

    link.core.shard_failed, link.core.shard_decoded = refuse, take  # type: ignore[method-assign]
    link.core.refusable_shards = lambda: list(held.values())  # type: ignore[method-assign]
    return link


def shard_of(header: Any, arrays: Any, *, seq: int = 5, index: int = 0) -> DecodeShard:
    fragment = Fragment("uuid", 1, seq, 9, 1, 0, 3, -1, header)
    frames = [bytes(memoryview(frame).cast("B")) for frame in encode_fragment(fragment, arrays)]
    return DecodeShard(Shard(1, 0, 0, 1, index, fragment.fragment_id, 0, 1), tuple(frames))


async def test_a_learner_refuses_what_is_outside_of_its_spaces_and_whatever_its_bytes_make_the_check_raise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events: list[Any] = []
    link = link_of_learner(events)
    header, arrays = EpisodeBatch.from_episodes([episode_of([0, 4], [1])]).to_wire()
    for batch in (header, {**header, "num_slots": -1}):
        link.act(shard_of(batch, arrays))
    header, arrays = EpisodeBatch.from_episodes([episode_of([0, 1], [1])]).to_wire()

    def overlooks(batch: Any, source: Any) -> None:
        raise IndexError("a case that nobody thought of")

    link._check.check = overlooks  # type: ignore[method-assign]
    link.act(shard_of(header, arrays))
    outside, damaged, overlooked = (detail for _, detail in events)
    assert "'obs': expected values of Discrete(4), got 4" in outside
    assert "num_slots" in damaged
    assert overlooked == "IndexError: a case that nobody thought of"
    assert "raised an error in its check" in caplog.text


async def test_a_fragment_whose_form_turns_out_to_be_wrong_is_refused_before_its_update_is_complete() -> None:
    events: list[Any] = []
    link = link_of_learner(events)

    def arrives(index: int, seq: int, extra: int) -> None:
        episode = SingleAgentEpisode()
        episode.add_env_reset(1)
        episode.add_env_step(2, 1, 1.0, extra_model_outputs={"extra": np.zeros(extra, np.float32)})
        link.act(shard_of(*EpisodeBatch.from_episodes([episode]).to_wire(), seq=seq, index=index))

    arrives(0, seq=0, extra=3)
    arrives(1, seq=1, extra=2)
    arrives(1, seq=2, extra=2)
    is_taken = [(index, detail is None) for index, detail in events]
    assert is_taken == [(0, True), (1, False), (0, False), (1, True)]
    assert "column" in events[2][1]
