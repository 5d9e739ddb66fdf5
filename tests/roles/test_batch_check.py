"""Fragments that would spoil an update are refused with the column's name; a module's trial step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlzmq import ConnectorV2, PPOConfig, RLModuleSpec
from rlzmq.core.names import WEIGHTS_SEQ_NO
from rlzmq.core.spaces import space_to_plain
from rlzmq.driver.async_env_runner_group import MergedConnectors
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.modules.rl_module import TorchRLModule
from rlzmq.protocol.learner_core import UnusableError
from rlzmq.roles.learner_link import BatchCheck, LearnerLink, form_of, module_outputs
from rlzmq.runners.vector_env_runners import SingleAgentEnvRunner
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


@pytest.mark.parametrize(
    "wrong", [np.zeros(3, np.float32), np.zeros(2, np.int64), {"a": np.zeros(2, np.float32)}]
)
def test_no_number_of_fragments_redefines_what_the_module_puts_out(wrong: Any) -> None:
    check = BatchCheck()
    check.expect({}, None, {"default_policy": {"logits": np.zeros((2, 2), np.float32)}})
    check.check(batch_of(logits=np.zeros(2, np.float32)))
    with pytest.raises(ValueError, match=r"logits.*; the module's own outputs define it$"):
        check.check(batch_of(logits=wrong))


def test_rewards_may_be_whole_numbers_in_one_fragment_and_not_in_the_next() -> None:
    assert BatchCheck().find_odd([form_of(batch_of(reward=reward)) for reward in (1, 0.5, True)]) == {}


USUAL, ODD = (form_of(batch_of(extra=np.zeros(size, np.float32))) for size in (2, 3))
WITHOUT = form_of(batch_of())


@pytest.mark.parametrize("odd", [ODD, WITHOUT])
def test_columns_that_no_space_knows_of_are_those_of_most_fragments(odd: Any) -> None:
    check = BatchCheck()
    assert check.find_odd([USUAL, USUAL]) == check.find_odd([odd]) == check.find_odd([]) == {}
    (place, detail), *others = check.find_odd([odd, USUAL, USUAL]).items()
    assert (place, others) == (0, [])
    assert detail.startswith("column \"('extra',)\"") or "'extra'" in detail
    check.trained([USUAL])
    assert check.find_odd([USUAL]) == {}
    assert check.find_odd([odd, USUAL]).keys() == {0}
    check.trained([USUAL])
    assert check.find_odd([odd] * 4) == {}
    check.forget()
    assert check.find_odd([odd, USUAL]).keys() == {1}


@pytest.mark.parametrize("odd", [ODD, WITHOUT])
def test_an_odd_first_fragment_or_a_new_form_does_not_get_all_others_refused(odd: Any) -> None:
    check = BatchCheck()
    assert check.find_odd([odd, USUAL]).keys() == {1}
    assert check.find_odd([odd, USUAL]).keys() == {0}  # planned again with the next fragment
    check.trained([USUAL, USUAL])
    refused = [check.find_odd([odd]) for _ in range(10)]  # updates of one fragment
    assert 1 < sum(map(bool, refused)) < 5
    assert refused[-1] == {}


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
        with pytest.raises(ValueError, match=f"'{column}': expected .*, got 10"):
            check.check(wrong)


def link_of_learner() -> LearnerLink:
    learner = SimpleNamespace(module={"default_policy": SimpleNamespace(action_space=gym.spaces.Discrete(2))})
    observations = space_to_plain(gym.spaces.Discrete(4))
    run_id, name, address = "run", "learner-0", "ipc:///nowhere"
    link = LearnerLink(
        learner, print, run_id=run_id, name=name, data_address=address, observation_space=observations
    )
    link.change_layout(None)
    return link


def why_refused(link: LearnerLink, header: Any, arrays: Any) -> str:
    fragment = Fragment("uuid", 1, 5, 9, 1, 0, 3, header)
    frames = [bytes(memoryview(frame).cast("B")) for frame in encode_fragment(fragment, arrays)]
    with pytest.raises(UnusableError) as caught:
        link._decode(Shard(1, 0, 0, 1, 0, fragment.fragment_id, 0, 1), tuple(frames))
    return str(caught.value)


async def test_a_learner_refuses_what_is_outside_of_its_spaces_and_whatever_its_bytes_make_the_check_raise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    link = link_of_learner()
    header, arrays = EpisodeBatch.from_episodes([episode_of([0, 4], [1])]).to_wire()
    assert "'obs': expected values of Discrete(4), got 4" in why_refused(link, header, arrays)
    assert "num_slots" in why_refused(link, {**header, "num_slots": -1}, arrays)
    header, arrays = EpisodeBatch.from_episodes([episode_of([0, 1], [1])]).to_wire()

    def overlooks(batch: Any) -> None:
        raise IndexError("a case that nobody thought of")

    link._check.check = overlooks  # type: ignore[method-assign]
    assert why_refused(link, header, arrays) == "IndexError: a case that nobody thought of"
    assert "raised an error in its check" in caplog.text


class Random(TorchRLModule):
    """Puts out more where it is a learner's, and draws numbers."""

    def setup(self) -> None:
        self.layer = torch.nn.Linear(4, 2)

    def _forward(self, batch: Any, **kwargs: Any) -> dict[str, Any]:
        logits = self.layer(batch["obs"]) + 0 * torch.rand(2)
        outputs = {"action_dist_inputs": logits, "latent": {"a": logits[:, :1], "b": logits.argmax(-1)}}
        return outputs if self.inference_only else {**outputs, "vf_preds": logits[:, 0]}


class Demanding(Random):
    """Reads what only a custom connector piece adds."""

    def _forward(self, batch: Any, **kwargs: Any) -> dict[str, Any]:
        return {"action_dist_inputs": self.layer(batch["my_column"])}


def _config(**model: Any) -> PPOConfig:
    config = PPOConfig().environment("CartPole-v1").env_runners(num_envs_per_env_runner=2)
    return config.debugging(seed=1).rl_module(**model)


MODELS: dict[str, dict[str, Any]] = {
    "default": {},
    "lstm": {"model_config": {"use_lstm": True, "lstm_cell_size": 8}},
    "lstm with the last action": {"model_config": {"use_lstm": True, "lstm_use_prev_action": True}},
    "custom": {"rl_module_spec": RLModuleSpec(module_class=Random)},
}


@pytest.mark.parametrize("explore", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_a_trial_step_knows_exactly_the_columns_of_a_fragment(model: str, explore: bool) -> None:
    config = _config(**MODELS[model]).env_runners(explore=explore)
    runner = SingleAgentEnvRunner(config=config)
    try:
        module = config.get_multi_rl_module_spec(spaces=runner.get_spaces()).build()["default_policy"]
        batch = runner.sample(num_timesteps=8)
    finally:
        runner.stop()
    before = torch.random.get_rng_state()
    outputs = module_outputs(module, explore=explore)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not module.inference_only
    assert outputs.keys() == batch.columns.keys() - {"obs", "actions", "rewards", WEIGHTS_SEQ_NO}
    check = BatchCheck()
    check.expect({}, None, {"default_policy": outputs})
    check.check(batch)
    name = "action_dist_inputs"
    batch.columns[name] = np.zeros((*batch.columns[name].shape, 2), np.float32)
    with pytest.raises(ValueError, match="the module's own outputs define it"):
        check.check(batch)


def test_a_module_that_cannot_be_tried_tells_nothing() -> None:
    box = gym.spaces.Box(-1, 1, (4,), np.float32)
    module = RLModuleSpec(module_class=Demanding, observation_space=box, action_space=gym.spaces.Discrete(2))
    assert module_outputs(module.build(), explore=True) == {}


@pytest.mark.parametrize("is_custom", [False, True])
def test_custom_pieces_behind_the_module_may_change_what_it_puts_out(is_custom: bool) -> None:
    class Piece(ConnectorV2):
        def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
            return batch

    config = _config()
    if is_custom:
        config.env_runners(module_to_env_connector=lambda *args, **kwargs: Piece())
    box, actions = gym.spaces.Box(-1, 1, (4,), np.float32), gym.spaces.Discrete(2)
    sync = MergedConnectors(config, {"__env_single__": (box, actions), "__env__": (box, actions)})
    assert sync.stores_module_outputs is not is_custom
