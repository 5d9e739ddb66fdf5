"""What trains in the ten tasks learns: the own env, with an LSTM, two agents, a search, a repaired scale of rewards."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.journeys.terminal import Terminal
from tests.journeys.test_ten_tasks import ELEVATOR, last_result, typed

pytestmark = pytest.mark.slow

MORE = """

class Recall(gym.Env):
    '''Name the cue of the first step at the end: who has no memory is right in half of the episodes.'''

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def observe(self):
        return np.array([2.0 * self.cue - 1.0 if self.t == 0 else 0.0, self.t / 4], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.t = int(self.np_random.integers(2)), 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        return self.observe(), float(self.t == 4 and action == self.cue), self.t == 4, False, {}


class Costly(gym.Wrapper):
    '''CartPole whose rewards are cents of a large account.'''

    def __init__(self, config=None):
        super().__init__(gym.make("CartPole-v1"))

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        return observation, 25_000.0 * reward, *rest
"""
TRAIN = (
    "--env-runners 0 --envs-per-env-runner 8 --train-batch-size-per-learner 1024 --minibatch-size 128 "
    "--num-epochs 6 --seed 1"
)


@pytest.fixture
def place(terminal: Terminal) -> Terminal:
    """A terminal in a directory with the newcomer's envs."""
    (terminal.cwd / "my_envs.py").write_text(ELEVATOR + MORE)
    return terminal


def evaluated(place: Terminal, run: str) -> float:
    """The mean return of what a run has learned."""
    typed(place, f"rlzmq evaluate {run} --episodes 50 --json {run}.json")
    scores = json.loads((place.cwd / f"{run}.json").read_text())
    return float(scores["return"]["mean"])


def test_the_own_env_is_solved_after_its_bug_is_fixed(place: Terminal) -> None:
    line = f"rlzmq train ppo --env my_envs:Elevator {TRAIN} --lr 1e-3"
    (place.cwd / "my_envs.py").write_text((ELEVATOR + MORE).replace("[True] * 6", "[True] * 3"))
    assert place.type(f"{line} --stop steps=30000 --run-dir runs/a").code == 70
    (place.cwd / "my_envs.py").write_text(ELEVATOR + MORE)
    typed(place, f"{line} --stop steps=30000 --run-dir runs/a --overwrite")
    assert evaluated(place, "runs/a") > -2.6  # who always goes up has -2 on average, who dawdles -15


def test_an_lstm_remembers_what_the_other_network_cannot(place: Terminal) -> None:
    line = f"rlzmq train ppo --env my_envs:Recall {TRAIN} --lr 1e-3 --stop steps=12000"
    line += " --model-config fcnet_hiddens=[32]"
    typed(place, f"{line} --run-dir runs/none")
    memory = "--model-config use_lstm=true --model-config lstm_cell_size=32 --model-config max_seq_len=8"
    typed(place, f"{line} --run-dir runs/lstm {memory}")
    assert evaluated(place, "runs/none") < 0.8
    assert evaluated(place, "runs/lstm") > 0.9


def test_two_agents_learn_to_pull(place: Terminal) -> None:
    page = (Path(__file__).parents[2] / "docs/how_to/several_agents.md").read_text()
    (place.cwd / "tug.py").write_text(page.partition("```python\n")[2].partition("config = (")[0])
    line = f"rlzmq train ppo --env tug:TugOfWar {TRAIN} --lr 1e-3 --stop steps=30000 --run-dir runs/tug"
    flags = re.search(r"--policies \S+ --policy-mapping-fn \S+:\w+", place.type(line).err)
    assert flags
    first, *_ = re.findall(r"^iter 1 .*", typed(place, f"{line} --overwrite {flags[0]}").out, re.M)
    lengths = [
        json.loads(row)["env_runners"]["episode_len_mean"]
        for row in (place.cwd / "runs/tug/metrics.jsonl").read_text().splitlines()
    ]
    assert lengths[0] < 12, first
    assert lengths[-1] > 15  # if both pull all the time, nobody wins before the limit of 20 steps


def test_the_best_of_a_search_is_better_than_its_worst(place: Terminal) -> None:
    pytest.importorskip("optuna")
    line = f"rlzmq tune ppo --env CartPole-v1 --preset none {TRAIN} --lr 1e-6,1e-3 --stop steps=25000 --name mine"
    done = typed(place, line)
    returns = dict(re.findall(r"^PPO_\S+ terminated lr (\S+) .*return (\S+)", done.out, re.M))
    assert len(returns) == 2, done
    assert float(returns["0.001"]) > 2 * float(returns["1e-06"]), done
    assert re.search(r"^ +lr = 0.001$", done.out, re.M), done
    best = re.search(r"^evaluate +rlzmq evaluate (\S+)$", done.out, re.M)
    assert best, done
    assert "return mean" in typed(place, f"rlzmq evaluate {best[1]} --episodes 5").out


def test_a_wrong_reward_scale_keeps_a_run_from_learning_until_it_is_repaired_as_health_says(
    place: Terminal,
) -> None:
    line = f"rlzmq train ppo --env my_envs:Costly {TRAIN} --lr 1e-3 --model-config vf_share_layers=true"
    typed(place, f"{line} --stop steps=30000 --run-dir runs/a")
    result = last_result(place, "runs/a")
    assert result["env_runners"]["episode_len_mean"] < 60
    remedy = result["health"]["rewards too large"]["remedy"]
    wrappers = re.search(r"wrappers=\[(.*)\]", remedy)
    assert wrappers, remedy
    named = ",".join(re.findall(r"\w+", wrappers[1]))
    typed(place, f"{line} --wrappers {named} --stop steps=30000 --run-dir runs/b")
    result = last_result(place, "runs/b")
    assert result["env_runners"]["episode_len_mean"] > 120
    assert not result.get("health")
