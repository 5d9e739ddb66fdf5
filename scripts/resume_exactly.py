"""Compares a run that is killed and resumed with one that is not killed, bit for bit: the last checkpoint of both.

Each case trains PPO on CartPole for some updates, writing a checkpoint after each ("agents…": on MultiAgentCartPole,
two agents with a module each). Its driver is killed (kill -9) at a random moment of an update, or of a checkpoint's
writing. Another process resumes from the newest intact checkpoint, is killed in turn, and so on; the last one trains to
the end. Its last checkpoint must equal that of a run that is not killed, and that begins new episodes where the
other one was resumed: weights, optimizer, connectors, counters. Only times are left out.

    python scripts/resume_exactly.py                     # 32 kills, one in each form of each case
    python scripts/resume_exactly.py --kills 100 --seed 3
    python scripts/resume_exactly.py --cases filter-8 --form processes

Forms: "serial" (all in the driver's process), "processes" (one env runner and one learner process), "runner" and
    "learner" (only that one in a separate process).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

CASES = ("mlp", "filter", "lstm", "previous", "stacking", "piece", "agents", "agentspiece")
FORMS = {"serial": (0, 0), "processes": (1, 1), "runner": (1, 0), "learner": (0, 1)}
# Values measured with a clock.
TIMES = {"durations_s", "duration_s", "time_total_s"}


def main() -> int:
    options = parse()
    import rlzmq.algorithms.algorithm
    import rlzmq.algorithms.ppo  # noqa: F401

    rng = random.Random(options.seed)
    pairs = [(form, case) for case in options.cases for form in options.form]
    num_kills = dict.fromkeys(pairs, 0)
    for index in range(options.kills):
        num_kills[pairs[index % len(pairs)]] += 1
    print(f"{options.updates} updates a run, seed {options.seed}", flush=True)
    num_done = num_different = 0
    with tempfile.TemporaryDirectory(prefix="rlzmq-resume-") as folder:
        for (form, case), kills in num_kills.items():
            if not kills:
                continue
            where = Path(folder) / f"{form}-{case}"
            seconds = undisturbed(where / "whole", case, form, options.updates)
            how, resumed = disturbed(where / "killed", case, form, options.updates, kills, seconds, rng)
            undisturbed(where / "same", case, form, options.updates, resumed)
            num_leaves, differences = compare(where / "same" / "last", where / "killed" / "last")
            num_done += len(how)
            num_different += bool(differences)
            verdict = f"{len(differences)} OF {num_leaves} VALUES DIFFER" if differences else "identical"
            print(
                f"{form:9} {case:10} {num_leaves:5} values  {verdict:10} killed {'; '.join(how)}", flush=True
            )
            for line in differences[:10]:
                print(f"    {line}")
    print(
        f"{num_done} kills, {len(pairs)} runs, {num_different} of them differ from those that were not killed"
    )
    return 1 if num_different or num_done < options.kills else 0


def parse() -> Any:
    all_cases = [f"{case}-{num_envs}" for case in CASES for num_envs in (1, 8)]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=32)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="+", choices=all_cases, default=all_cases, metavar="CASE")
    parser.add_argument("--form", nargs="+", choices=FORMS, default=["serial", "processes"])
    return parser.parse_args()


# -- the run ------------------------------------------------------------------------------------------


def make_config(case: str, form: str) -> Any:
    from rlzmq import PPOConfig
    from rlzmq.connectors.connector_v2 import ConnectorV2
    from rlzmq.connectors.env_to_module import (
        FlattenObservations,
        FrameStackingEnvToModule,
        MeanStdFilter,
        PrevActionsPrevRewards,
    )
    from rlzmq.connectors.learner import FrameStackingLearner
    from rlzmq.envs.examples import MultiAgentCartPole

    class Remembers(ConnectorV2):
        """A custom piece that needs single episodes and stores data in them."""

        def __call__(self, *, batch: dict[str, Any], episodes: Any, **kwargs: Any) -> dict[str, Any]:
            for episode in self.single_agent_episode_iterator(episodes):
                episode.custom_data["seen"] = episode.custom_data.get("seen", 0) + 1
            return batch

    name, _, num_envs = case.rpartition("-")
    pieces = {
        "filter": lambda env, spaces, device: MeanStdFilter(),
        "previous": lambda env, spaces, device: [
            PrevActionsPrevRewards(n_prev_actions=2, n_prev_rewards=2),
            FlattenObservations(),
        ],
        "stacking": lambda env, spaces, device: FrameStackingEnvToModule(num_frames=3),
        "piece": lambda env, spaces, device: [Remembers(), MeanStdFilter()],
        "agents": lambda env, spaces, device: MeanStdFilter(multi_agent=True),
        "agentspiece": lambda env, spaces, device: [Remembers(), MeanStdFilter(multi_agent=True)],
    }
    model: dict[str, Any] = {"fcnet_hiddens": [16]}
    if name == "lstm":
        model |= {"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 10}
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_envs_per_env_runner=int(num_envs), env_to_module_connector=pieces.get(name))
        .training(
            train_batch_size_per_learner=400,
            minibatch_size=100,
            num_epochs=3,
            lr=[[0, 3e-3], [4000, 1e-3]],
            entropy_coeff=[[0, 0.01], [4000, 0.0]],
        )
        .rl_module(model_config=model)
        .debugging(seed=11)
    )
    if name == "stacking":
        config.env_runners(episode_lookback_horizon=3)
        config.training(learner_connector=lambda spaces, act, device: FrameStackingLearner(num_frames=3))
    if name.startswith("agents"):
        config.environment(MultiAgentCartPole, env_config={"num_agents": 2})
        config.multi_agent(policies={"p0", "p1"}, policy_mapping_fn=lambda agent, episode: f"p{agent}")
    num_env_runners, num_learners = FORMS[form]
    return config.env_runners(num_env_runners=num_env_runners).learners(num_learners=num_learners)


def train(folder: Path, case: str, form: str, updates: int, restored: Collection[int] = ()) -> int:
    """Train in the process that is killed. In these iterations, go back to the state that is there already."""
    from rlzmq.algorithms.algorithm import Algorithm
    from rlzmq.algorithms.checkpoints import latest_checkpoint
    from rlzmq.core import faults

    faults.arm("driver")
    config = make_config(case, form)
    newest = latest_checkpoint(folder / "checkpoints")
    algorithm = config.build() if newest is None else Algorithm.from_checkpoint(newest, config=config)
    with algorithm:
        algorithm.keep_checkpoints(folder / "checkpoints", every_s=0.0, num=3)
        print(f"begins {algorithm.iteration}", flush=True)
        while algorithm.iteration < updates:
            if algorithm.iteration in restored:
                algorithm.restore_from_path(algorithm.save_to_path(folder / "here"))
            algorithm.train()
            print(f"update {algorithm.iteration}", flush=True)
        algorithm.save_to_path(folder / "last")
    return 0


# -- kills --------------------------------------------------------------------------------------------


class Run:
    """A run in a process forked from this one, so that nothing needs to be imported again."""

    def __init__(
        self,
        folder: Path,
        case: str,
        form: str,
        updates: int,
        fault: str = "",
        restored: Collection[int] = (),
    ) -> None:
        sys.stdout.flush()
        reading, writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                os.dup2(writing, 1)
                os.close(writing)
                os.close(reading)
                os.environ["RLZMQ_FAULT"] = fault
                code = train(folder, case, form, updates, restored)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        os.close(writing)
        self._output = os.fdopen(reading)
        line = self._output.readline()
        if not line.startswith("begins"):
            raise RuntimeError(f"the run in {folder} did not begin: exit code {self.wait()}, {line!r}")
        self.begun_at = time.monotonic()
        self.begun_with = int(line.split()[1])
        self.updates = 0

    def wait(self, timeout_s: float = 600.0) -> int | None:
        """Return the exit code, negative for a signal; None if it does not end in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                # ends once all processes of the run are gone
                self.updates = sum(line.startswith("update") for line in self._output)
                self._output.close()
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                return None
            time.sleep(0.002)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)


def undisturbed(folder: Path, case: str, form: str, updates: int, restored: Collection[int] = ()) -> float:
    """Train to the end; return the seconds."""
    run = Run(folder, case, form, updates, restored=restored)
    if code := run.wait():
        raise RuntimeError(f"the undisturbed run {folder} ended with exit code {code}")
    return time.monotonic() - run.begun_at


def disturbed(
    folder: Path, case: str, form: str, updates: int, kills: int, seconds: float, rng: random.Random
) -> tuple[list[str], set[int]]:
    """Train with this number of kills; return a description of each, and the iterations where it was resumed."""
    how: list[str] = []
    resumed: set[int] = set()
    while len(how) < kills:
        before = progress(folder)
        # So that updates remain for the other kills.
        share = (1.0 - before / updates) / (kills - len(how) + 1)
        in_write = rng.random() < 0.4
        # a checkpoint of these runs is written in about 100 steps: files, their halves, fsyncs, renames
        fault = f"checkpoint.boundary@driver:kill:{rng.randint(1, 150)}" if in_write else ""
        run = Run(folder, case, form, updates, fault)
        resumed.add(run.begun_with)
        code = None if in_write else run.wait(rng.uniform(0.02, 1.4) * share * seconds)
        if code is None and not in_write:
            run.kill()
        code = run.wait() if code is None else code
        if code == 0:  # it ended before it could be killed: repeat from the start
            shutil.rmtree(folder)
            how.clear()
            resumed.clear()
        elif code != -signal.SIGKILL:
            raise RuntimeError(f"the run in {folder} ended with exit code {code}")
        else:
            how.append(
                f"{'while writing' if in_write else 'in update'} {before + run.updates + (not in_write)}"
            )
    run = Run(folder, case, form, updates)
    if code := run.wait():
        raise RuntimeError(f"the resumed run in {folder} ended with exit code {code}")
    return how, (resumed | {run.begun_with}) - {0}


def progress(folder: Path) -> int:
    """Return the newest checkpoint's iteration."""
    names = [path.name for path in (folder / "checkpoints").glob("[0-9]*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


# -- the verdict --------------------------------------------------------------------------------------


def compare(whole: Path, killed: Path) -> tuple[int, list[str]]:
    """Return the number of values, and the paths of those that differ."""
    from rlzmq.core.checkpoint import read_checkpoint

    first, second = (dict(leaves(read_checkpoint(path))) for path in (whole, killed))
    differences = [f"{path} is only in one of them" for path in sorted(first.keys() ^ second.keys())]
    for path in sorted(first.keys() & second.keys()):
        if first[path] != second[path]:
            differences.append(
                f"{path}: {str(first[path])[:60]} without, {str(second[path])[:60]} with kills"
            )
    return len(first), differences


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, comparable value) of everything that is compared."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key not in TIMES:
                yield from leaves(item, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        yield path, len(value)
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}/{index}")
    elif hasattr(value, "tobytes"):
        yield path, (str(value.dtype), value.shape, value.tobytes())
    else:
        yield path, json.dumps(value) if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
