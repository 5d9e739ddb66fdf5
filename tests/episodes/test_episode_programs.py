"""Random programs: SingleAgentEpisode against the reference model, on lists, arrays and views of batches."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlzmq.core.tree import tree_leaves, tree_stack, tree_unstack
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from tests.episodes.multi_agent_model import plain
from tests.episodes.reference_model import (
    BOX,
    DICT,
    DISCRETE,
    FILLER,
    FLOAT,
    OBJECT,
    TEXT,
    VECTOR,
    ReferenceEpisode,
)

GETTERS = ("observations", "actions", "rewards", "infos")
OPERATIONS = 14


class Program:
    """One run of random operations; every operation is checked as soon as it is done."""

    def __init__(self, seed: int, num_operations: int) -> None:
        self.pick = random.Random(seed).randint
        self.log: list[str] = []
        self.rng = np.random.default_rng(self.pick(0, 10**6))
        observation_kind = (DISCRETE, BOX, DICT, TEXT, OBJECT)[self.pick(0, 4)]
        action_kind = (DISCRETE, BOX, DICT, TEXT, OBJECT)[self.pick(0, 4)]
        extra_kinds = ({}, {"logp": FLOAT}, {"logp": OBJECT, "dist": VECTOR})[self.pick(0, 2)]
        reward_kind = (FLOAT, FLOAT, FLOAT, TEXT, OBJECT)[self.pick(0, 4)]
        self.model = ReferenceEpisode(observation_kind, action_kind, extra_kinds, reward_kind)
        self.episode = self._begin()
        # Earlier chunks and copies: what happens later must not show in them.
        self.frozen: list[tuple[SingleAgentEpisode, ReferenceEpisode]] = []
        self.operations: list[Callable[[], None]] = [
            self.add_step, self.add_step, self.add_step, self.get, self.get, self.get, self.set, self.set,
            self.convert, self.cut, self.slice, self.grow_and_concat, self.copy, self.refuse,
        ]  # fmt: skip
        try:
            for _ in range(num_operations):
                operation = self.operations[self.pick(0, OPERATIONS - 1)]
                self.log.append(operation.__name__)
                operation()
            self.check_all()
        except Exception as error:
            error.add_note(f"after {self.log}")
            raise

    def _begin(self) -> SingleAgentEpisode:
        model, given = self.model, self.pick(0, 6)
        spaces = {
            "observation_space": model.observation_kind.space,
            "action_space": model.action_kind.space,
        }
        if given == 0:
            episode = SingleAgentEpisode(**spaces)
            observation, info = self.draw("observations"), self._info()
            model.reset(observation, info)
            episode.add_env_reset(observation, info)
            return episode
        # Ready-made data with a lookback part, given as lists or arrays.
        lookback = self.pick(0, given)
        t_started = lookback + self.pick(0, 2)
        model.t = model.first = t_started - lookback
        model.reset(self.draw("observations"), self._info())
        for _ in range(given):
            self._model_step("")
        model.t_started = t_started
        as_arrays = self.pick(0, 1)
        data = {name: [column.items[t] for t in column.times()] for name, column in model.columns.items()}
        if as_arrays:
            data = {
                name: items if name == "infos" else tree_stack(items, objects=True)
                for name, items in data.items()
            }
        return SingleAgentEpisode(
            **spaces,
            **{name: data[name] for name in GETTERS},
            extra_model_outputs={name: data[name] for name in model.extra_kinds},
            t_started=t_started,
            len_lookback_buffer=lookback,
        )

    # -- random parts --

    def draw(self, name: str) -> Any:
        return self.model.columns[name].kind.draw(self.rng)

    def _info(self) -> Any:
        return ({}, {}, {"k": self.pick(0, 9)}, {"k": self.pick(0, 9)}, "text", OBJECT.draw(self.rng))[
            self.pick(0, 5)
        ] or {}

    def _model_step(self, end: str) -> dict[str, Any]:
        step = {
            "observation": self.draw("observations"),
            "action": self.draw("actions"),
            "reward": self.draw("rewards"),
            "info": self._info(),
            "extras": {name: self.draw(name) for name in self.model.extra_kinds},
        }
        self.model.step(**step, end=end)
        return step

    def _index(self, name: str) -> int:
        size = len(self.model.columns[name].items)
        index = self.pick(-size - 2, size + 1)
        return np.int64(index) if self.pick(0, 9) == 0 else index

    def _indices(self, name: str) -> Any:
        kind = self.pick(0, 5)
        if kind == 0:
            return None
        if kind == 1:
            return self._index(name)
        if kind == 2:
            indices = [self._index(name) for _ in range(self.pick(0, 3))]
            return np.array(indices, np.int64) if self.pick(0, 3) == 0 else indices
        bounds = [None if self.pick(0, 3) == 0 else int(self._index(name)) for _ in range(2)]
        return slice(*bounds, (None, 1, 2, 3, -1, -2)[self.pick(0, 5)] if self.pick(0, 1) else None)

    def _name(self) -> str:
        names = [*GETTERS, *self.episode.extra_model_outputs]
        return names[self.pick(0, len(names) - 1)]

    def _get(self, episode: SingleAgentEpisode, name: str, indices: Any, **options: Any) -> Any:
        if name in GETTERS:
            return getattr(episode, f"get_{name}")(indices, **options)
        return episode.get_extra_model_outputs(name, indices, **options)

    # -- operations --

    def add_step(self) -> None:
        if self.model.terminated or self.model.truncated:
            return
        end = ("", "", "", "", "", "", "terminated", "truncated")[self.pick(0, 7)]
        step = self._model_step(end)
        before = len(self.episode)
        self.episode.add_env_step(
            step["observation"],
            step["action"],
            step["reward"],
            step["info"],
            terminated=end == "terminated",
            truncated=end == "truncated",
            extra_model_outputs=step["extras"] or None,
        )
        assert len(self.episode) == before + 1

    def get(self) -> None:
        name, neg = self._name(), bool(self.pick(0, 1))
        indices = self._indices(name)
        options: dict[str, Any] = {"neg_index_as_lookback": neg}
        hot = name in ("observations", "actions") and self.pick(0, 2) == 0
        hot = hot and self.model.columns[name].kind.space is not None
        if hot:
            options["one_hot_discrete"] = True
        fill = self.pick(0, 3) if self.pick(0, 1) else None
        if fill is not None:
            options["fill"] = fill
        self.log.append(f"{name} {indices} {options}")
        try:
            expected = self.model.get(name, indices, neg, fill, hot)
        except IndexError:
            with pytest.raises(IndexError, match="out of range"):
                self._get(self.episode, name, indices, **options)
            return
        actual = self._get(self.episode, name, indices, **options)
        if isinstance(indices, (int, np.integer)):
            self.check_item(name, actual, expected, fill, hot)
        else:
            self.check_items(name, actual, expected, fill, hot)

    def check_item(self, name: str, actual: Any, expected: Any, fill: Any, hot: bool) -> None:
        column = self.model.columns[name]
        if expected is FILLER:
            expected = self._filler(name, column, fill, hot)
        assert plain(actual) == plain(expected), f"{name}: {actual} != {expected}"

    def _filler(self, name: str, column: Any, fill: Any, hot: bool) -> Any:
        finalized = self._buffer(name).finalized
        if name == "rewards" and not finalized:  # filled as of their space, whatever they are
            return FLOAT.filler(fill, hot)
        if name == "infos" or column.kind is OBJECT:
            return fill
        if column.kind is TEXT:
            return str(fill) if finalized else fill
        bare = column.kind in (VECTOR, FLOAT) and not column.items
        if name == "rewards" or (name not in GETTERS and finalized):
            bare = False
        return fill if bare else column.kind.filler(fill, hot)

    def _buffer(self, name: str) -> Any:
        return getattr(self.episode, name) if name in GETTERS else self.episode.extra_model_outputs[name]

    def check_items(
        self, name: str, actual: Any, expected: list[Any], fill: Any = None, hot: bool = False
    ) -> None:
        if self._buffer(name).finalized:
            leaves = tree_leaves(actual)
            assert all(isinstance(leaf, np.ndarray) and len(leaf) == len(expected) for leaf in leaves), actual
            actual = tree_unstack(actual) if expected else []
        else:
            assert type(actual) is list
        assert len(actual) == len(expected), f"{name}: {actual} != {expected}"
        for a, e in zip(actual, expected, strict=True):
            self.check_item(name, a, e, fill, hot)

    def set(self) -> None:
        name = self._name()
        if name == "infos":
            return
        neg, indices = bool(self.pick(0, 1)), self._indices(name)
        self.log.append(f"{name} {indices} {neg}")
        single = isinstance(indices, (int, np.integer))
        num = 1 if single else len(self.model.wanted(name, indices, neg, False))
        if not single and self.pick(0, 5) == 0:
            num += 1
        items = [self.draw(name) for _ in range(num)]
        new: Any = items[0] if single else items
        if not single and items and self.pick(0, 1):
            new = tree_stack(items, objects=True)
        options = {"new_data": new, "at_indices": indices, "neg_index_as_lookback": neg}
        if name in GETTERS:
            setter = getattr(self.episode, f"set_{name}")
        else:
            setter, options["key"] = self.episode.set_extra_model_outputs, name
        try:
            self.model.set(name, items, indices, neg)
        except IndexError:
            with pytest.raises(IndexError):
                setter(**options)
        else:
            setter(**options)

    def convert(self) -> None:
        if len(self.episode) == 0:
            assert self.episode.to_numpy() is self.episode
        elif self.pick(0, 1):
            self.episode.to_numpy()
            assert self.episode.is_numpy
        elif not self._is_batchable():
            with pytest.raises(ValueError, match=r"expected (a reward|numbers)|column of numb"):
                EpisodeBatch.from_episodes([self.episode])
        else:
            # A view on a batch's columns, with another episode beside it.
            other = SingleAgentEpisode()
            other.add_env_reset(self.episode.get_observations(0))
            batch = EpisodeBatch.from_episodes([other, self.episode, other])
            self.episode = batch[1] if self.pick(0, 1) else list(batch)[1]
            self.frozen.append((batch.new_items()[1], self.model.copy()))  # its columns are not changed
            assert self.episode.is_numpy

    def _is_batchable(self) -> bool:
        model = self.model
        return model.reward_kind is FLOAT and not any(
            column.kind is OBJECT and column.items for column in model.columns.values()
        )

    def cut(self) -> None:
        lookback = self.pick(0, 4)
        if self.model.terminated or self.model.truncated:
            with pytest.raises(RuntimeError, match="ongoing"):
                self.episode.cut(lookback)
            return
        self._freeze()
        self.episode, self.model = self.episode.cut(lookback), self.model.cut(lookback)
        assert len(self.episode) == 0

    def slice(self) -> None:
        bounds = [None if self.pick(0, 3) == 0 else self.pick(-5, 6) for _ in range(2)]
        lookback = self.pick(0, 4) if self.pick(0, 1) else None
        if lookback is None and self.pick(0, 1):
            part = self.episode[slice(*bounds)]
        else:
            part = self.episode.slice(slice(*bounds), len_lookback_buffer=lookback)
        model = self.model.slice(*bounds, lookback)
        if self.pick(0, 2) == 0:
            self._freeze()
            self.episode, self.model = part, model
        else:
            self.frozen.append((part, model))

    def grow_and_concat(self) -> None:
        if self.model.terminated or self.model.truncated:
            return
        head, head_model = self.episode, self.model
        self.episode, self.model = head.cut(self.pick(0, 2)), head_model.cut(0)
        self.model = head_model.cut(self.episode.rewards.lookback)
        self.episode.custom_data["last"] = self.model.custom_data["last"] = self.pick(0, 99)
        for _ in range(self.pick(0, 3)):
            self.add_step()
        if self.pick(0, 1) and len(self.episode):
            self.episode.to_numpy()
        self._freeze()
        head.concat_episode(self.episode)
        head_model = head_model.copy()
        head_model.concat(self.model)
        self.episode, self.model = head, head_model

    def copy(self) -> None:
        how = self.pick(0, 2)
        self._freeze()
        if how == 0:
            self.episode = pickle.loads(pickle.dumps(self.episode))
        elif how == 1:
            self.episode = copy.deepcopy(self.episode)
        else:
            self.episode = SingleAgentEpisode.from_state(self.episode.get_state())

    def refuse(self) -> None:
        """Calls that must fail and leave the episode as it was."""
        episode, model = self.episode, self.model
        with pytest.raises(RuntimeError):
            episode.add_env_reset(self.draw("observations"))
        step = (self.draw("observations"), self.draw("actions"), 0.0)
        if model.terminated or model.truncated:
            with pytest.raises(RuntimeError):
                episode.add_env_step(*step)
        elif model.columns["rewards"].items:
            extras = {name: self.draw(name) for name in model.extra_kinds}
            with pytest.raises(ValueError, match="late"):
                episode.add_env_step(*step, extra_model_outputs={**extras, "late": 0})
        with pytest.raises(NotImplementedError):
            episode[0]  # type: ignore[index]
        with pytest.raises(KeyError):
            episode.get_extra_model_outputs("unknown")
        with pytest.raises(KeyError):
            episode.set_extra_model_outputs(key="unknown", new_data=[])
        with pytest.raises(ValueError, match="continued"):
            episode.concat_episode(SingleAgentEpisode(episode.id_, t_started=10**6))

    # -- checks --

    def _freeze(self) -> None:
        if self.pick(0, 1):
            self.frozen.append((self.episode, self.model.copy()))

    def check_all(self) -> None:
        self.check()
        for episode, model in self.frozen:
            if episode is not self.episode:
                self.episode, self.model = episode, model
                self.check()

    def check(self) -> None:
        episode, model = self.episode, self.model
        episode.validate()
        assert (episode.t, episode.t_started, len(episode)) == (
            model.t,
            model.t_started,
            model.t - model.t_started,
        )
        assert (episode.is_terminated, episode.is_truncated) == (model.terminated, model.truncated)
        assert episode.is_done == (model.terminated or model.truncated)
        assert episode.is_reset == model.is_reset
        assert episode.custom_data == model.custom_data
        rewards = model.get("rewards", None)
        if model.reward_kind is FLOAT or not rewards:
            assert episode.get_return() == sum(rewards)
        else:
            with pytest.raises(ValueError, match="column 'rewards': item 0: expected"):
                episode.get_return()
        assert "SingleAgentEpisode" in repr(episode)
        assert episode.env_steps() == episode.agent_steps() == len(rewards)
        assert set(episode.extra_model_outputs) == (
            set(model.extra_kinds) if rewards else episode.extra_model_outputs.keys()
        )
        for name, column in model.columns.items():
            if name not in (*GETTERS, *episode.extra_model_outputs):
                continue
            everything = slice(model.first - model.t_started, None)
            self.check_items(name, self._get(episode, name, everything, neg_index_as_lookback=True),
                             [column.items[time] for time in column.times()])  # fmt: skip
            buffer = self._buffer(name)
            assert len(buffer) == len(list(buffer)) == len(model.get(name, None))


@pytest.mark.parametrize(
    "block", [0, 1, *(pytest.param(more, marks=pytest.mark.slow) for more in range(2, 6))]
)
def test_random_programs_agree_with_the_reference_model(block: int) -> None:
    """300 programs per block, 1,800 in all; a failure's seed is the number in its note."""
    for seed in range(300 * block, 300 * (block + 1)):
        try:
            Program(seed, num_operations=14)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
