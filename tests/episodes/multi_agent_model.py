"""A brute-force model of MultiAgentEpisode: a log of env steps, read from the start for every fact."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from rlzmq.episodes.agent_timelines import AgentTrack, Pending, Timeline
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from tests.episodes.reference_model import OBJECT, ReferenceEpisode

AGENTS: list[Any] = [0, 1, "x", ("t", 2)]
FILL = -7


@dataclass
class Step:
    observations: dict[Any, int]
    actions: dict[Any, int]
    rewards: dict[Any, int]
    infos: dict[Any, dict[str, int]]
    terminateds: dict[Any, bool]
    truncateds: dict[Any, bool]
    outputs: dict[Any, dict[str, int]]

    def add_to(self, episode: MultiAgentEpisode) -> None:
        episode.add_env_step(
            self.observations,
            self.actions,
            self.rewards,
            self.infos,
            terminateds=self.terminateds,
            truncateds=self.truncateds,
            extra_model_outputs=self.outputs,
        )


@dataclass
class Life:
    """One agent's life as the log tells it: what it observed when, and its steps."""

    obs: list[tuple[int, int, dict[str, int]]] = field(default_factory=list)  # env_t, observation, info
    steps: list[tuple[int, int, dict[str, int]]] = field(default_factory=list)  # action, reward, outputs
    pending: tuple[int, dict[str, int]] | None = None
    reward: int = 0
    before: int = 0
    terminated: bool = False
    truncated: bool = False
    done_t: int | None = None


class Model:
    """Log and chunk bounds; mirrors one MultiAgentEpisode."""

    def __init__(self) -> None:
        self.reset: dict[Any, int] = {}
        self.log: list[Step] = []
        self.begin = 0  # env step of the chunk's start
        self.end = 0
        self.lookback = 0
        self.first: dict[Any, int] = {}  # agent -> index of its first stored observation
        self.start: dict[Any, int] = {}  # agent -> index of the observation its chunk starts with
        self.hidden: set[Any] = set()  # agents whose data are not stored
        self.make: Callable[[int], Any] = int  # observations and actions of numbers that never repeat

    def copy(self) -> Model:
        other = Model()
        other.reset, other.log = self.reset, list(self.log)
        other.begin, other.end, other.lookback = self.begin, self.end, self.lookback
        other.first, other.start, other.hidden = dict(self.first), dict(self.start), set(self.hidden)
        other.make = self.make
        return other

    def life(self, agent: Any, until: int | None = None) -> Life:
        life = Life()
        if agent in self.reset:
            life.obs.append((0, self.reset[agent], {}))
        for env_t, step in enumerate(self.log[:until], 1):
            own_end, own_cut = step.terminateds.get(agent, False), step.truncateds.get(agent, False)
            ends = own_end or step.terminateds.get("__all__", False)
            is_cut = own_cut or step.truncateds.get("__all__", False)
            reward = step.rewards.get(agent, 0)
            if not life.obs:
                life.before += reward
                if agent in step.observations:
                    if ends or is_cut:
                        life.terminated, life.truncated, life.done_t = ends, is_cut, env_t
                        break
                    life.obs.append((env_t, step.observations[agent], step.infos.get(agent, {})))
                continue
            if agent in step.actions:
                life.pending = (step.actions[agent], step.outputs.get(agent, {}))
            life.reward += reward
            if agent in step.observations or (ends and life.pending):
                last = life.obs[-1]
                observation = step.observations.get(agent, last[1])
                info = step.infos.get(agent, {} if agent in step.observations else last[2])
                assert life.pending is not None
                life.obs.append((env_t, observation, info))
                life.steps.append((life.pending[0], life.reward, life.pending[1]))
                life.pending, life.reward = None, 0
            if ends or is_cut:
                life.terminated, life.truncated, life.done_t = ends, is_cut, env_t
                break
        return life

    # -- facts of the chunk ------------------------------------------------------------------------

    def agents(self) -> list[Any]:
        return [
            a for a in AGENTS if a not in self.hidden and any(t <= self.end for t, _, _ in self.life(a).obs)
        ]

    def stored(self, agent: Any) -> dict[str, Any]:
        """What the chunk stores of an agent: observations and steps, by position."""
        life = self.life(agent)
        first, start = self.first.get(agent, 0), self.start.get(agent, 0)
        obs = [o for o in life.obs[first:] if o[0] <= self.end]
        steps = life.steps[first : first + len(obs) - 1]
        hanging = None
        if obs[-1][0] < self.end:
            k = first + len(obs) - 1
            if k < len(life.steps):
                hanging = life.steps[k]
            elif life.pending is not None:
                hanging = (life.pending[0], life.reward, life.pending[1])
        is_done = life.done_t is not None and life.done_t <= self.end
        return {
            "obs": obs,
            "steps": steps,
            "hanging": hanging,
            "lookback": start - first,
            "t_started": start,
            "terminated": is_done and life.terminated,
            "truncated": is_done and life.truncated,
        }

    def is_done(self) -> bool:
        return self.done() != (False, False)

    def done(self) -> tuple[bool, bool]:
        """(terminated, truncated) of the whole episode at the chunk's end."""
        if not self.log or self.end < len(self.log):
            return False, False
        step = self.log[-1]
        all_end, all_cut = step.terminateds.get("__all__", False), step.truncateds.get("__all__", False)
        lives = [self.life(a) for a in AGENTS]
        known = [life for life in lives if life.obs or life.done_t is not None]
        everyone = bool(known) and all(life.done_t is not None for life in known)
        return all_end or (everyone and not all_cut), all_cut

    # -- operations --------------------------------------------------------------------------------

    def add(self, step: Step) -> None:
        self.log.append(step)
        self.end += 1

    def cut(self, lookback: int) -> Model:
        new = self.copy()
        new.begin = self.end
        stored = {a: self.stored(a) for a in self.agents()}
        for data in stored.values():
            if data["hanging"] is not None:
                lookback = max(lookback, self.end - data["obs"][-1][0])
        new.lookback = min(lookback, self.end - self.begin + self.lookback)
        for agent, data in stored.items():
            first = self.first.get(agent, 0)
            num = len(data["obs"])
            kept = [k for k in range(num) if data["obs"][k][0] >= new.begin - new.lookback] or [num - 1]
            if (data["terminated"] or data["truncated"]) and kept[0] == num - 1:
                new.hidden.add(agent)
            new.first[agent], new.start[agent] = first + kept[0], first + num - 1
        return new

    def slice(self, start: int, stop: int, lookback: int | None) -> Model:
        start, stop, _ = slice(start, stop).indices(self.end - self.begin)
        stop = max(start, stop)
        new = self.copy()
        new.begin, new.end = self.begin + start, self.begin + stop
        wanted = self.lookback if lookback is None else lookback
        stored = {agent: self.stored(agent) for agent in self.agents()}
        for data in stored.values() if start == 0 else ():
            own = data["lookback"]
            if len(data["steps"]) > own or data["hanging"] is not None:
                wanted = max(wanted, self.begin - data["obs"][own][0])
        new.lookback = min(wanted, start + self.lookback)
        for agent, data in stored.items():
            first = self.first.get(agent, 0)
            times = [o[0] for o in data["obs"]]
            in_slice = [k for k, t in enumerate(times) if new.begin - new.lookback <= t <= new.end]
            # the chunk's own steps stay in a slice from its start, whatever they started from
            own_ks = [k for k in range(data["lookback"], len(times)) if times[k] <= new.end and start == 0]
            kept = sorted({*in_slice, *own_ks})
            life = self.life(agent)
            is_done = (data["terminated"] or data["truncated"]) and life.done_t is not None
            is_done = is_done and life.done_t <= new.end  # type: ignore[operator]
            if not kept or (is_done and len(kept) == 1 and life.done_t <= new.begin):  # type: ignore[operator]
                new.hidden.add(agent)
                continue
            own_start = self.start.get(agent, 0) - first
            before = [k for k in kept if (times[k] < new.begin if start else k < own_start)]
            new.first[agent] = first + kept[0]
            new.start[agent] = first + kept[0] + min(len(before), len(kept) - 1)
        for agent in AGENTS:  # not yet there at the slice's end
            if agent not in self.hidden and not any(t <= new.end for t, _, _ in self.life(agent).obs):
                new.hidden.add(agent)
        return new

    # -- getters -----------------------------------------------------------------------------------

    def get(
        self, what: str, indices: Any, agents: Any, neg: bool, fill: int | None, return_list: bool
    ) -> Any:
        env_steps = ReferenceEpisode(OBJECT, OBJECT, {}, t_started=self.begin, t=self.end, is_reset=True)
        env_steps.first = self.begin - self.lookback
        times = range(env_steps.first, env_steps.end(what))
        single = isinstance(indices, int)
        wanted = env_steps.wanted(what, [indices] if single else indices, neg, fill is not None)
        if fill is None and any(t not in times for t in wanted):
            raise IndexError
        per_step: list[dict[Any, Any]] = []
        for t in wanted:
            row = {}
            for agent in self.agents() if agents is None else [a for a in self.agents() if a in agents]:
                value = self.value(what, agent, t) if t in times else None
                if value is not None:
                    row[agent] = value
                elif fill is not None:
                    row[agent] = {"fill": 1} if what == "infos" else fill
            per_step.append(row)
        if return_list:
            return per_step
        if single:
            return per_step[0]
        found: dict[Any, list[Any]] = {}
        for row in per_step:
            for agent, value in row.items():
                found.setdefault(agent, []).append(value)
        return found

    def value(self, what: str, agent: Any, env_t: int) -> Any:
        data = self.stored(agent)
        for k, (t, observation, info) in enumerate(data["obs"]):
            if t == env_t:
                if what == "observations":
                    return observation
                if what == "infos":
                    return info
                step = data["steps"][k] if k < len(data["steps"]) else data["hanging"]
                if step is None:
                    return None
                return step[0] if what == "actions" else step[1] if what == "rewards" else step[2][what]
        return None


def random_step(rng: random.Random, model: Model, counter: list[int]) -> Step:
    """A step that the rules allow, with values that never repeat."""

    def number() -> int:
        counter[0] += 1
        return counter[0]

    def fresh() -> Any:
        return model.make(number())

    step = Step({}, {}, {}, {}, {}, {}, {})
    all_end, all_cut = rng.random() < 0.02, rng.random() < 0.02
    if all_end:
        step.terminateds["__all__"] = True
    if all_cut:
        step.truncateds["__all__"] = True
    for agent in AGENTS:
        life = model.life(agent)
        if life.done_t is not None:
            continue
        if not life.obs:
            if rng.random() < 0.15:
                step.rewards[agent] = rng.randrange(5)
            if rng.random() < 0.2:
                step.observations[agent] = fresh()
                if rng.random() < 0.1:
                    step.terminateds[agent] = True
            continue
        acted = life.pending is not None
        if not acted and rng.random() < 0.8:
            acted = True
            step.actions[agent] = fresh()
            step.outputs[agent] = {"logp": number()}
        if acted and rng.random() < 0.65:
            step.observations[agent] = fresh()
        if rng.random() < 0.06:
            step.terminateds[agent] = True
        if rng.random() < 0.05:
            step.truncateds[agent] = True
        is_cut = step.truncateds.get(agent) or all_cut
        ends = step.terminateds.get(agent) or all_end
        if acted and is_cut and not ends:
            step.observations[agent] = fresh()
        if agent in step.observations and rng.random() < 0.4:
            step.infos[agent] = {"i": number()}
        if (agent in step.observations and agent in step.actions) or rng.random() < 0.5:
            step.rewards[agent] = rng.randrange(1, 9)
    return step


def facts(episode: Any) -> Any:
    """All of an episode's data, with their types, but how long it took; to be compared with ``==``."""

    def comparable(value: Any) -> Any:
        if isinstance(value, Timeline | AgentTrack | Pending):
            value = {each.name: getattr(value, each.name) for each in fields(value)}
        if isinstance(value, dict):
            return {
                key: comparable(item) for key, item in value.items() if key not in ("duration_s", "repeated")
            }
        if isinstance(value, list | tuple):
            return [type(value), *map(comparable, value)]
        return (value.dtype, value.shape, value.tolist()) if isinstance(value, np.ndarray) else value

    return comparable(episode.get_state())


def plain(value: Any) -> Any:
    """Arrays as lists, to compare with the model's."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return value.item()
    if isinstance(value, list | np.ndarray):
        return [plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def assert_same(episode: MultiAgentEpisode, model: Model) -> None:
    """All stored data and all facts agree."""
    episode.validate()
    assert (episode.env_t_started, episode.env_t, len(episode)) == (
        model.begin,
        model.end,
        model.end - model.begin,
    )
    assert episode.len_lookback_buffer == model.lookback
    agents = model.agents()
    assert episode.agent_ids == set(agents)
    total = hanging_total = num_steps = 0
    for agent in agents:
        data, sae = model.stored(agent), episode.agent_episodes[agent]
        lookback = data["lookback"]
        assert plain(sae.observations.data) == [o[1] for o in data["obs"]], agent
        assert list(sae.infos.data) == [o[2] for o in data["obs"]]
        assert plain(sae.actions.data) == [s[0] for s in data["steps"]]
        assert plain(sae.rewards.data) == [s[1] for s in data["steps"]]
        if data["steps"]:
            assert plain(sae.extra_model_outputs["logp"].data) == [s[2]["logp"] for s in data["steps"]]
        assert (sae.observations.lookback, sae.t_started) == (lookback, data["t_started"]), agent
        assert (sae.is_terminated, sae.is_truncated) == (data["terminated"], data["truncated"])
        assert (sae.agent_id, sae.module_id, sae.multi_agent_episode_id) == (agent, f"m{agent}", episode.id_)
        total += sum(s[1] for s in data["steps"][lookback:])
        num_steps += len(data["steps"]) - lookback
        life = model.life(agent)
        if data["hanging"] is not None:
            hanging_total += data["hanging"][1]
        elif data["obs"][-1][0] < model.end and data["obs"][-1] == life.obs[-1]:
            hanging_total += life.reward
        if life.obs[0][0] > model.begin or model.begin == 0:
            hanging_total += life.before
    if model.end == len(model.log):
        for agent in AGENTS:
            life = model.life(agent)
            if not life.obs and life.done_t is None:
                hanging_total += life.before
    assert all(gone[2] <= model.end for gone in episode._timeline.departed.values())
    assert episode.get_return() == total
    assert episode.get_return(include_hanging_rewards=True) == total + hanging_total
    assert episode.agent_steps() == num_steps
    assert (episode.is_terminated, episode.is_truncated) == model.done()
    here = {a for a in agents if model.stored(a)["obs"][-1][0] == model.end}
    assert episode.get_agents_that_stepped() == here
    alive = {a for a in here if not (model.stored(a)["terminated"] or model.stored(a)["truncated"])}
    assert episode.get_agents_to_act() == (set() if model.is_done() else alive)
    assert episode.get_terminateds() == {
        **{a: model.stored(a)["terminated"] for a in agents}, "__all__": model.done()[0]
    }  # fmt: skip
    assert episode.get_truncateds() == {
        **{a: model.stored(a)["truncated"] for a in agents}, "__all__": model.done()[1]
    }  # fmt: skip


def assert_same_getter(rng: random.Random, episode: MultiAgentEpisode, model: Model) -> None:
    """One getter with random arguments agrees."""
    what = rng.choice(["observations", "infos", "actions", "rewards", "logp"])
    low, high = -model.lookback - len(episode) - 3, len(episode) + 4
    kind = rng.randrange(4)
    fill = FILL if rng.random() < 0.4 else None
    indices: Any = None
    if kind == 1:
        indices = rng.randrange(low, high)
    elif kind == 2:
        indices = [rng.randrange(low, high) for _ in range(rng.randrange(4))]
    elif kind == 3:
        bounds = [rng.choice([None, rng.randrange(low, high)]) for _ in range(2)]
        indices = slice(*bounds, rng.choice([None, 1, 2, 3, -1, -2]))
        # fillers for slices that lie wholly outside of the data: see the buffer's own tests
        if fill is not None:
            indices = slice(0, rng.randrange(1, high))
    neg = rng.random() < 0.5
    agents = None if rng.random() < 0.7 else rng.sample(AGENTS, 2)
    return_list = rng.random() < 0.4
    arguments: dict[str, Any] = {"neg_index_as_lookback": neg, "return_list": return_list}
    if fill is not None:
        arguments["fill"] = {"fill": 1} if what == "infos" else fill
    try:
        expected = model.get(what, indices, agents, neg, fill, return_list)
    except IndexError:
        expected = IndexError
    try:
        if what == "logp":
            chosen = [a for a in model.agents() if agents is None or a in agents]
            if not any(model.stored(a)["steps"] or model.stored(a)["hanging"] for a in chosen):
                return
            actual = episode.get_extra_model_outputs("logp", indices, agents, **arguments)
        else:
            actual = getattr(episode, f"get_{what}")(indices, agents, **arguments)
    except IndexError:
        actual = IndexError
    assert plain(actual) == expected, (what, indices, agents, arguments)
