"""Pulls cables between machines that train together: how soon it is noticed, and what is left when it heals.

    python scripts/partitions.py notice --repeat 20            # a runner host dies or is cut off
    python scripts/partitions.py local --repeat 20             # deaths of a runner of the head's own
    python scripts/partitions.py learners --repeat 20          # the same for learner hosts, and the next update
    python scripts/partitions.py heal --cut 60 --repeat 5      # whole runner host cut off, then mended
    python scripts/partitions.py heal --cut 60 --one-way       # what the host sends vanishes, the rest arrives
    python scripts/partitions.py narrow --runners 2 6          # runners behind 10 Mbit/s, 50 ms, 1 % loss

The machines are network namespaces (tests/support/machines.py), so it needs root. Every run is `rlzmq train` with
CURVE keys and runners or learners that join by ssh-less commands; seconds are from the fault to the head's own line
about it, as it is read from its output. `heal` judges the histories of all processes at the end
(`tests/support/fault_history.py`). Exit code 1: a promise was broken.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import gymnasium
import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.support.machines import Machine, Machines, why_no_machines  # noqa: E402

PORT = 5555
_STEP_S = 0.002
_ALL_BACK_SHARE = 0.8
_MORE_SHARE = 1.0  # of the rate of fewer runners
_LOST_RUNNER = r"broker: runner \S+ lost"


class PacedCartPole(gymnasium.Wrapper):  # type: ignore[type-arg]
    """CartPole at its own pace, so that the runs' rates do not depend on who else uses the machine."""

    def __init__(self, **options: Any) -> None:
        super().__init__(gymnasium.make("CartPole-v1", **options))

    def step(self, action: Any) -> Any:
        time.sleep(_STEP_S)
        return super().step(action)


class Program:
    """``rlzmq …`` on a machine; its lines, and when each was read."""

    def __init__(self, machine: Machine, *arguments: str, **environment: str) -> None:
        self.machine = machine
        paths = f"{ROOT}:{ROOT / 'scripts'}"
        self.process = machine.popen(
            [sys.executable, "-m", "rlzmq", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
            start_new_session=True, cwd=machine.directory,
            env=machine.environment(PYTHONPATH=paths, PYTHONUNBUFFERED="1", **environment),
        )  # fmt: skip
        self.lines: list[tuple[float, str]] = []
        self._changed = threading.Condition()
        self._is_over = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append((time.monotonic(), line.rstrip()))
                self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait_for(self, pattern: str, *, since: float = 0.0, timeout_s: float = 60.0) -> float:
        """When the first line that matches was read, at `since` or later."""
        deadline = time.monotonic() + timeout_s
        seen = 0
        with self._changed:
            while True:
                for at, line in self.lines[seen:]:
                    if at >= since and re.search(pattern, line):
                        return at
                seen = len(self.lines)
                if self._is_over or time.monotonic() >= deadline:
                    raise RuntimeError(f"no {pattern!r} within {timeout_s:g} s in:\n{self.tail()}")
                self._changed.wait(max(0.0, deadline - time.monotonic()))

    def tail(self) -> str:
        """The last lines, but for updates."""
        lines = [line for _, line in self.lines if not line.startswith("iter")]
        return "\n".join([*lines[-30:], *(line for _, line in self.lines[-2:])])

    def steps(self) -> list[tuple[float, int]]:
        """(when, env steps so far) of every update."""
        found = ((at, re.match(r"iter .* steps (\d+)", line)) for at, line in list(self.lines))
        return [(at, int(match[1])) for at, match in found if match]

    def rate(self, begin: float, end: float) -> float:
        """Env steps per second between two moments."""
        points = self.steps()
        before = [steps for at, steps in points if at <= begin] or [0]
        after = [steps for at, steps in points if at <= end] or [0]
        return (after[-1] - before[-1]) / (end - begin)


class Cluster:
    """A head, and runners and learners of other machines that join it.

    Args:
        num: Machines; the first is the head.
        train: Further arguments of ``rlzmq train``.
    """

    def __init__(self, num: int, *train: str, history: Path | None = None) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="partitions-")
        directory = Path(self._temporary.name)
        self.machines = Machines(num, directory)
        self.join = directory / "join.toml"
        self.environment = {"RLZMQ_HISTORY": str(history)} if history is not None else {}
        self.head = Program(
            self.machines[0], "train", "ppo", "--env", "partitions:PacedCartPole", "--preset", "none",
            "--envs-per-env-runner", "4", "--batch-size-per-learner", "200", "--minibatch-size", "100",
            "--num-epochs", "1", "--listen", f"tcp://{self.machines[0].address}:{PORT}",
            "--join-file", str(self.join), "--run-dir", str(directory / "run"), *train, **self.environment,
        )  # fmt: skip

    def start(self, role: str, number: int, *arguments: str) -> Program:
        """A runner or learner on a machine; returns at once."""
        file = self.join if role == "runner" else self.join.with_name("join.learner.toml")
        deadline = time.monotonic() + 60
        while not file.exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {file}:\n{self.head.tail()}")
            time.sleep(0.05)
        return Program(self.machines[number], role, "--join", str(file), *arguments, **self.environment)

    def updates(self, num: int, *, since: float | None = None, timeout_s: float = 60.0) -> float:
        """Wait for so many updates: when the last was committed."""
        at = time.monotonic() if since is None else since
        for _ in range(num):
            at = self.head.wait_for(r"^iter \d+", since=at, timeout_s=timeout_s) + 1e-6
        return at

    def stop(self) -> str:
        """Ctrl-C for the head: its account."""
        self.head.process.send_signal(signal.SIGINT)
        self.head.wait_for(r"^accounting: ")
        self.head.process.wait(30)
        return next(line for _, line in self.head.lines if line.startswith("accounting"))

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.machines.close()
        self.head.process.wait()
        self._temporary.cleanup()


class Seconds(defaultdict[str, list[float]]):
    """What was measured, by name."""

    def __init__(self) -> None:
        super().__init__(list)

    def add(self, name: str, seconds: float) -> None:
        """One more."""
        self[name].append(seconds)
        print(f"  {name}: {seconds:.3f} s", flush=True)

    def show(self, limits: dict[str, float]) -> bool:
        """Print p50, p99 and the most of each; whether all are within their limits."""
        is_good = True
        for name, values in self.items():
            values.sort()
            p50, p99 = (values[min(len(values) - 1, int(q * len(values)))] for q in (0.5, 0.99))
            limit = next((limits[key] for key in limits if name.startswith(key)), None)
            is_good &= limit is None or p99 <= limit
            told = "" if limit is None else f"  (limit {limit:g} s{'' if p99 <= limit else ': BROKEN'})"
            print(f"{name:44s} {len(values):4d} times: p50 {p50:.3f} s, p99 {p99:.3f} s{told}")
        return is_good


def notice(repeat: int, *, is_local: bool) -> bool:
    """Deaths and cuts of a runner host, or deaths of a local runner, until the head says so."""
    seconds = Seconds()
    with (
        tempfile.TemporaryDirectory(prefix="history-") as name,
        Cluster(2, "--env-runners", "1", history=Path(name)) as cluster,
    ):
        history = Path(name)
        head, (first, second) = cluster.head, cluster.machines
        runner = cluster.start("runner", 1)
        cut = {
            "cable pulled": (second.cut, second.mend),
            "one way, from the runner": (
                lambda: second.cut_towards(first),
                lambda: second.mend_towards(first),
            ),
            "one way, to the runner": (
                lambda: first.cut_towards(second),
                lambda: first.mend_towards(second),
            ),
        }
        runner.wait_for(" joined ")
        cluster.updates(2)
        for _ in range(repeat if is_local else 0):
            local = _forked_runner(history, head.process.pid)
            start = time.monotonic()
            local.kill()
            seconds.add("local runner, kill -9", head.wait_for(r"Restarted in", since=start) - start)
            _wait_back(cluster, 2)
        for _ in range(0 if is_local else repeat):
            for name, (begin, end) in cut.items():
                time.sleep(0.13)  # at another phase of the heartbeats
                start = time.monotonic()
                begin()
                seconds.add(f"remote runner, {name}", head.wait_for(_LOST_RUNNER, since=start) - start)
                end()
                _wait_back(cluster, 2)
            start = time.monotonic()
            runner.process.kill()
            seconds.add("remote runner, kill -9", head.wait_for(_LOST_RUNNER, since=start) - start)
            runner = cluster.start("runner", 1)
            runner.wait_for(" joined ")
            _wait_back(cluster, 2)
        print(cluster.stop())
    return seconds.show({"remote": 2.0, "local": 0.1})


def _wait_back(cluster: Cluster, num_runners: int) -> None:
    """Until the broker has so many runners again, by its own status."""
    address = next(path for path in cluster.machines[0].directory.glob("rlzmq-*/data"))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        output = subprocess.run(
            [sys.executable, "-m", "rlzmq", "top", f"ipc://{address}", "--count", "1"],
            capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
        ).stdout  # fmt: skip
        if len(re.findall(r"^runner-\S+ .*  ok", output, re.MULTILINE)) == num_runners:
            return
        time.sleep(0.1)
    raise RuntimeError(f"not {num_runners} runners:\n{output}\n{cluster.head.tail()}")


def _forked_runner(history: Path, head_pid: int) -> psutil.Process:
    """The head's own runner that lives, by its history's name; it may be about to begin it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for path in history.glob("runner-0.*.jsonl"):
            number = int(path.name.split(".")[1])
            for process in psutil.Process(head_pid).children(recursive=True):
                if process.pid == number and process.status() != psutil.STATUS_ZOMBIE:
                    return process
        time.sleep(0.02)
    raise AssertionError("the head has no runner of its own")


def learners(repeat: int) -> bool:
    """Deaths and cuts of one of two learner hosts, until the head says so and until the next update."""
    seconds = Seconds()
    remote = ("--learners", "2", "--num-remote-learners", "2", "--env-runners", "0")
    with Cluster(4, *remote) as cluster:
        head, machine = cluster.head, cluster.machines[3]
        runner = cluster.start("runner", 1)
        ranks = {number: cluster.start("learner", number) for number in (2, 3)}
        runner.wait_for(" joined ")
        for rank in ranks.values():
            rank.wait_for("is rank")
        cluster.updates(2)
        for _ in range(repeat):
            for name in ("cable pulled", "kill -9"):
                time.sleep(0.13)
                start = time.monotonic()
                if name == "kill -9":
                    ranks[3].process.kill()
                else:
                    machine.cut()
                noticed = head.wait_for(r"learner-\d is lost", since=start)
                seconds.add(f"learner host, {name}: noticed", noticed - start)
                seconds.add(f"learner host, {name}: next update", cluster.updates(1, since=noticed) - start)
                if name != "kill -9":
                    seconds.add("learner host, the cut rank ends", _ended(ranks[3]) - start)
                    machine.mend()
                ranks[3] = cluster.start("learner", 3)
                back = ranks[3].wait_for("is rank")
                cluster.updates(3, since=back)
        print(cluster.stop())
    return seconds.show({f"learner host, {name}: noticed": 2.0 for name in ("cable pulled", "kill -9")})


def _ended(program: Program) -> float:
    program.process.wait(60)
    return time.monotonic()


def heal(cut_s: float, repeat: int, *, one_way: bool) -> bool:
    """The only runner host is cut off for `cut_s` seconds, again and again; the histories are judged."""
    from tests.support.fault_history import HistoryError, check_history, read_history

    seconds = Seconds()
    with tempfile.TemporaryDirectory(prefix="history-") as name:
        history = Path(name)
        with Cluster(2, "--env-runners", "0", "--learners", "1", history=history) as cluster:
            first, second = cluster.machines
            runners = [cluster.start("runner", 1) for _ in range(2)]
            for runner in runners:
                runner.wait_for(" joined ")
            cluster.updates(5)
            for _ in range(repeat):
                time.sleep(4.0)
                start = time.monotonic()
                usual = cluster.head.rate(start - 3.0, start)
                if one_way:
                    second.cut_towards(first)
                else:
                    second.cut()
                time.sleep(max(0.0, start + cut_s - time.monotonic()))
                mended = time.monotonic()
                if one_way:
                    second.mend_towards(first)
                else:
                    second.mend()
                what = f"{cut_s:g} s cut" + (", one way" if one_way else "")
                seconds.add(f"{what}: first update after it", cluster.updates(1, since=mended) - mended)
                while cluster.head.rate(time.monotonic() - 1.0, time.monotonic()) < _ALL_BACK_SHARE * usual:
                    if time.monotonic() - mended > 60:
                        raise RuntimeError(f"{usual:.0f} steps/s do not come back:\n{cluster.head.tail()}")
                    time.sleep(0.02)
                # The window of a second begins where the rate is back.
                seconds.add(f"{what}: usual rate again", max(0.0, time.monotonic() - mended - 1.0))
                if any(runner.process.poll() is not None for runner in runners):
                    raise RuntimeError("a runner ended:\n" + "\n".join(runner.tail() for runner in runners))
            print(cluster.stop())
            for runner in runners:
                runner.process.wait(30)
        try:
            print(check_history(read_history(history)))
        except HistoryError as error:
            print(f"BROKEN PROMISE: {error}")
            return False
    return seconds.show({f"{cut_s:g} s cut{way}: usual rate again": 5.0 for way in ("", ", one way")})


def narrow(numbers: list[int], seconds: float, *, apart: bool) -> bool:
    """Runners behind 10 Mbit/s, 50 ms and 1 % loss: env steps per second by their number."""
    rates, num_lost = {}, 0
    for num_runners in numbers:
        with Cluster(2, "--env-runners", "0") as cluster:
            head, machine = cluster.head, cluster.machines[1]
            count, each = (num_runners, 1) if apart else (1, num_runners)
            runners = [cluster.start("runner", 1, "--env-runners", str(each)) for _ in range(count)]
            _wait_back(cluster, num_runners)
            cluster.updates(1)
            router = machine.slow_down()
            try:
                cluster.updates(5)
                since = time.monotonic()
                time.sleep(seconds)
                rates[num_runners] = head.rate(since, time.monotonic())
                lost = [line for at, line in head.lines if at >= since and re.search(_LOST_RUNNER, line)]
                num_lost += len(lost)
                account = cluster.stop()
            finally:
                router.kill()
                router.wait()
            print(
                f"{num_runners} runners: {rates[num_runners]:.0f} steps/s, lost {len(lost)} times; {account}"
            )
            print("\n".join(sorted({re.sub(r"runner-\S+", "R", line) for line in lost})[:5]), flush=True)
            for runner in runners:
                runner.process.terminate()
                runner.process.wait(30)
    ordered = [rates[num] for num in sorted(rates)]
    return not num_lost and all(more >= _MORE_SHARE * fewer for fewer, more in itertools.pairwise(ordered))


def main() -> int:
    """Measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("notice", "local", "learners", "heal", "narrow"))
    parser.add_argument("--runners", type=int, nargs="+", default=[2, 6], help="of `narrow`")
    parser.add_argument(
        "--apart", action="store_true", help="of `narrow`: each runner by its own command, not by one for all"
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="of `narrow`, each")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--cut", type=float, default=60.0, help="seconds of each cut of `heal`")
    parser.add_argument("--one-way", action="store_true")
    args = parser.parse_args()
    if reason := why_no_machines():
        print(f"not here: {reason}")
        return 1
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(1))  # nothing stays behind
    if args.what == "narrow":
        return not narrow(args.runners, args.seconds, apart=args.apart)
    if args.what == "heal":
        return not heal(args.cut, args.repeat, one_way=args.one_way)
    if args.what == "learners":
        return not learners(args.repeat)
    return not notice(args.repeat, is_local=args.what == "local")


if __name__ == "__main__":
    sys.exit(main())
