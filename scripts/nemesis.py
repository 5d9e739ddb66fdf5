"""Kills processes of a training run at random, and proves from their histories that nothing was lost.

    python scripts/nemesis.py --kills 60                     # runners, learner ranks, the broker
    python scripts/nemesis.py --kills 1000 --impatient       # the next kill long before all processes are back
    python scripts/nemesis.py --kills 100 --roles broker     # the gap after a broker's death
    python scripts/nemesis.py --kills 50 --how stop          # SIGSTOP instead of SIGKILL
    python scripts/nemesis.py --kills 50 --how hold --roles runner learner   # the interpreter's lock, held in C
    python scripts/nemesis.py --kills 50 --how wait --roles learner          # a loss that never returns
    python scripts/nemesis.py --kills 300 --algo impala                      # runners sample ahead of the learners
    python scripts/nemesis.py --kills 60 --algo dqn --impatient              # half of a replay buffer dies with a rank
    python scripts/nemesis.py --kills 60 --algo impala --impatient --shared-bytes 1  # every fragment in shared memory
    python scripts/nemesis.py --kills 60 --algo appo --agents 2 --at-once 2  # two agents; two processes at a time
    python scripts/nemesis.py --storm --faults 500 --minutes 20              # all faults at once (see _storm.py)

Each kill comes at a random moment of an update, once all processes are back from the one before (`--impatient`: two
updates after it). It counts only if the process's exit status shows the signal. The seconds from a kill to the next
committed update are printed by role. Exit code 1: a guarantee was broken, or training made no progress.

With a replay buffer (dqn, sac) "trained once" means "taken in once": steps are drawn repeatedly, those of a dead
rank's buffer are dropped as ``buffer_lost``, and after each update the ratio of drawn to taken in steps must be the
configured one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ROLES = ("runner", "learner", "broker")
WAYS = ("kill", "stop", "hold", "wait")
_STANDSTILL_S = 60.0
# After a hang, others get more time until the run has worked for a while.
_UPDATES_BETWEEN_HANGS = 100
_MIN_BETWEEN_HANGS_S = 3.0


def hold_the_lock(role: Any) -> None:
    """Hold the interpreter's lock forever, in C, on the actor's thread."""
    while True:
        ctypes.PyDLL(None).pause()


def wait_in_the_loss(role: Any) -> None:
    """Make the loss of this rank never return."""
    role.learner.compute_loss_for_module = lambda **kwargs: threading.Event().wait()


def policy_of(agent_id: Any, *args: Any, **kwargs: Any) -> str:
    """Return the policy of an agent (policy_mapping_fn)."""
    return f"p{agent_id}"


class Nemesis:
    """Kills at random while `train` runs.

    Args:
        algo: A started AsyncAlgorithm.
        num_kills, roles, seed: Number of kills, roles to kill, and seed of the random stream.
        how: One of WAYS.
        is_impatient: Whether the next kill comes before all processes are back.
        num_at_once: Number of processes that are killed at the same moment, of any roles.
    """

    def __init__(
        self,
        algo: Any,
        *,
        num_kills: int,
        roles: list[str],
        seed: int,
        how: str,
        is_impatient: bool,
        num_at_once: int = 1,
    ) -> None:
        self.algo = algo
        self.session = algo.session
        self.num_kills = num_kills
        self.roles = roles
        self.random = random.Random(seed)
        self.how = how
        self.is_impatient = is_impatient
        self.num_at_once = num_at_once
        self.num_updates = 0
        self.num_killed = 0
        self.result: dict[str, Any] = {}
        self.updated = asyncio.Condition()
        self.gaps_s: dict[str, list[float]] = defaultdict(list)
        self.replaced_s: dict[str, list[float]] = defaultdict(list)
        self.update_s: list[float] = []

    async def run(self) -> None:
        """Train until all kills have been survived, and for two more updates."""
        training = asyncio.create_task(self._train())
        try:
            while self.num_killed < self.num_kills:
                await self._guard(training, self._wait_for_the_moment())
                await asyncio.sleep(self.random.random() * max(self.update_s[-5:]))
                await self._guard(training, self._kill_some())
            await self._guard(training, self._wait_healthy())
            await self._guard(training, self._next_updates(2))
        finally:
            training.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await training

    async def _guard(self, training: asyncio.Task[None], work: Any) -> None:
        """Wait for something that must happen while training continues."""
        task = asyncio.ensure_future(work)
        done, _ = await asyncio.wait(
            (task, training), timeout=_STANDSTILL_S, return_when=asyncio.FIRST_COMPLETED
        )
        if task in done:
            return task.result()
        task.cancel()
        if training in done:
            training.result()
        broker = self.session.pipeline._broker.handle
        status = await asyncio.wait_for(broker.status(), 5)
        raise RuntimeError(f"nothing happened for {_STANDSTILL_S:g} s; the broker says: {status}")

    async def _train(self) -> None:
        while True:
            start = time.monotonic()
            self.result = await self.algo.train()
            if self.algo.config.update_plan().train_ratio:
                check_ratio(self.algo.config, self.result)
            self.update_s.append(time.monotonic() - start)
            self.num_updates += 1
            async with self.updated:
                self.updated.notify_all()

    async def _wait_for_the_moment(self) -> None:
        if self.is_impatient:
            await self._next_updates(2)
            while not any(map(self._may_die, self.roles)):  # noqa: ASYNC110 (state of other objects)
                await asyncio.sleep(0.01)
            return
        await self._wait_healthy()
        await self._next_updates(1)
        if self.how in ("hold", "wait"):
            until = time.monotonic() + _MIN_BETWEEN_HANGS_S
            await self._next_updates(_UPDATES_BETWEEN_HANGS)
            while time.monotonic() < until:
                await self._next_updates(1)

    def _living(self, role: str) -> list[Any]:
        handles = {
            "runner": self.session.env_runner_group.handles,
            "learner": self.session.learner_group.handles,
            "broker": [self._broker()],
        }[role]
        return [handle for handle in handles if not handle.exited.done()]

    def _may_die(self, role: str, taken: Sequence[Any] = ()) -> bool:
        """Return whether another process of the role may die than those that are about to.

        The last rank may not, since its weights would be lost with it.
        """
        left = [handle for handle in self._living(role) if handle not in taken]
        return len(left) > (role == "learner")

    async def _next_updates(self, num: int) -> None:
        target = self.num_updates + num
        async with self.updated:
            await self.updated.wait_for(lambda: self.num_updates >= target)

    async def _wait_healthy(self) -> None:
        config, session = self.algo.config, self.session
        while (  # noqa: ASYNC110 (state of other objects, without events)
            session.env_runner_group.num_healthy_remote_workers() < config.num_env_runners
            or len(session.learner_group.handles) < config.num_learners
            or any(handle.exited.done() for handle in session.learner_group.handles)
            or self._broker().exited.done()
        ):
            await asyncio.sleep(0.01)

    def _broker(self) -> Any:
        return self.session.pipeline._broker.handle

    async def _kill_some(self) -> None:
        """Kill as many processes as are hit at once; return after the next update, or once all are back."""
        chosen: list[tuple[str, Any]] = []
        for _ in range(min(self.num_at_once, self.num_kills - self.num_killed)):
            taken = [handle for _, handle in chosen]
            roles = [role for role in self.roles if self._may_die(role, taken)]
            if roles:
                role = self.random.choice(roles)
                left = [handle for handle in self._living(role) if handle not in taken]
                chosen.append((role, self.random.choice(left)))
        await asyncio.gather(*(self._kill(role, handle) for role, handle in chosen))
        for _ in chosen:
            self.num_killed += 1
            if self.num_killed % 20 == 0:
                print(f"{self.num_killed} kills, {self.num_updates} updates", flush=True)

    async def _kill(self, role: str, handle: Any) -> None:
        from rlzmq.core import faults

        start = time.monotonic()
        if self.how in ("hold", "wait"):
            fault = asyncio.ensure_future(
                handle.apply(hold_the_lock if self.how == "hold" else wait_in_the_loss)
            )
            # It dies during the call.
            fault.add_done_callback(lambda done: done.cancelled() or done.exception())
        else:
            handle.send_signal(signal.SIGSTOP if self.how == "stop" else signal.SIGKILL)
        gap = asyncio.ensure_future(self._next_updates(1))
        status = await handle.exited  # of a stopped process: once its supervisor has noticed and killed it
        if status.signal_number != signal.SIGKILL:
            raise RuntimeError(f"the fault did not fire: {handle.name} {status}")
        faults.record("killed", place=handle.name, pid=handle.pid)
        await gap
        self.gaps_s[role].append(time.monotonic() - start)
        if self.is_impatient:
            return
        await self._wait_healthy()
        self.replaced_s[role].append(time.monotonic() - start)


def check_ratio(config: Any, result: dict[str, Any]) -> None:
    """Check that as many steps were drawn from the replay buffers as are due for the steps taken in, up to one batch.

    Raises:
        AssertionError: The numbers differ by more than a batch.
    """
    account, plan = result["accounting"], config.update_plan()
    taken_in = account["trained"] + account["dropped"].get("buffer_lost", 0)
    due = plan.train_ratio * max(0, taken_in - plan.warm_up)
    drawn = result["num_env_steps_trained_lifetime"]
    assert 0 <= due - drawn < config.total_train_batch_size, (
        f"{drawn} steps drawn, {due:g} are due for {taken_in} taken in"
    )


async def attack(args: argparse.Namespace, directory: Path) -> Any:
    """Run under attack; return the Nemesis and the last accounting."""
    from rlzmq import APPOConfig, DQNConfig, IMPALAConfig, PPOConfig, SACConfig
    from rlzmq.envs.examples import MultiAgentCartPole

    ranks = max(args.learners, 1)
    classes = {
        "ppo": PPOConfig,
        "impala": IMPALAConfig,
        "appo": APPOConfig,
        "dqn": DQNConfig,
        "sac": SACConfig,
    }
    config: Any = classes[args.algo]()
    config = (
        config.environment("Pendulum-v1" if args.algo == "sac" else "CartPole-v1")
        .env_runners(num_env_runners=args.env_runners, num_envs_per_env_runner=4)
        .learners(num_learners=args.learners)
        .rl_module(model_config={"fcnet_hiddens": [32]})
        .reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=1)
        .debugging(seed=args.seed)
    )
    if args.algo in ("dqn", "sac"):
        config.env_runners(rollout_fragment_length=30).training(
            train_batch_size=64,
            n_step=3,
            training_intensity=2.0,
            num_steps_sampled_before_learning_starts=480,
        )
    else:
        config.training(train_batch_size_per_learner=480 // ranks, minibatch_size=60, num_epochs=2, lr=1e-3)
        if args.algo != "ppo":
            config.env_runners(rollout_fragment_length=20)
    if args.agents > 1:
        config.environment(MultiAgentCartPole, env_config={"num_agents": args.agents}).multi_agent(
            policies={f"p{agent}" for agent in range(args.agents)}, policy_mapping_fn=policy_of
        )
    if args.staleness is not None:
        config.training(staleness=args.staleness)
    async with config.build_async() as algo:
        nemesis = Nemesis(
            algo,
            num_kills=args.kills,
            roles=args.roles,
            seed=args.seed,
            how=args.how,
            is_impatient=args.impatient,
            num_at_once=args.at_once,
        )
        await nemesis.run()
        return nemesis


def storm_config(args: argparse.Namespace, directory: Path) -> Any:
    """Return a config with two ranks, three runners, and a port for joining runners."""
    from rlzmq import PPOConfig

    return (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=3, num_envs_per_env_runner=4)
        .learners(num_learners=2)
        .training(train_batch_size_per_learner=240, minibatch_size=60, num_epochs=2, lr=1e-3)
        .rl_module(model_config={"fcnet_hiddens": [32]})
        .networking(listen="tcp://127.0.0.1:0", join_file=str(directory / "run.toml"))
        .debugging(seed=args.seed)
    )


async def rage(args: argparse.Namespace, directory: Path) -> bool:
    """Run a storm; return whether training never paused too long."""
    from _storm import MAX_STILL_S, Lines, Storm

    config = storm_config(args, directory)
    async with (
        Lines(directory, config.num_env_runners, config.num_learners) as lines,
        config.build_async() as algo,
    ):
        storm = Storm(
            algo,
            lines,
            num_faults=args.faults,
            seconds=60 * args.minutes,
            seed=args.seed,
            directory=directory,
            long_s=args.explain_s,
        )
        await storm.run()
        stood_still = [gap for gap in storm.gaps_s if gap > MAX_STILL_S]
        print(f"{args.faults} faults in {args.minutes:g} minutes: {dict(sorted(storm.fired.items()))}")
        print(f"{algo.session.fault_tolerance()}\n{algo.session.accounting}")
        print(
            f"between two updates: p50 {quantile(storm.gaps_s, 0.5):.3f} s, p99 {quantile(storm.gaps_s, 0.99):.2f} s, "
            f"max {max(storm.gaps_s):.1f} s; {len(stood_still)} stand-stills above {MAX_STILL_S:g} s"
        )
        return not stood_still


def main_storm(args: argparse.Namespace) -> int:
    """Run a storm and judge it."""
    from rlzmq.core import faults
    from tests.support.fault_history import HistoryError, check_history, read_history

    with tempfile.TemporaryDirectory() as scratch:
        history = args.history or Path(scratch) / "history"
        os.environ["RLZMQ_HISTORY"] = str(history)
        faults.arm("driver")
        is_good = asyncio.run(rage(args, Path(scratch)))
        try:
            print(check_history(read_history(history)))
        except HistoryError as error:
            print(f"BROKEN PROMISE: {error}")
            return 1
    return 0 if is_good else 1


def quantile(values: list[float], q: float) -> float:
    """Return the quantile `q` (nearest rank)."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def main() -> int:
    """Run, check the histories, print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=list(ROLES))
    parser.add_argument("--algo", choices=("ppo", "impala", "appo", "dqn", "sac"), default="ppo")
    parser.add_argument(
        "--staleness", type=int, help="batches that runners may be ahead (default: the algorithm's)"
    )
    parser.add_argument("--agents", type=int, default=1, help="agents of the env, with a policy each")
    parser.add_argument("--env-runners", type=int, default=2)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument(
        "--how", choices=WAYS, default="kill", help="SIGKILL, SIGSTOP, or a hang in Python or C"
    )
    parser.add_argument("--at-once", type=int, default=1, help="processes killed at the same moment")
    parser.add_argument("--impatient", action="store_true", help="do not wait until everybody is back")
    parser.add_argument(
        "--shared-bytes",
        type=int,
        help="size from which fragments are in shared memory (1: all; default: 1 MB)",
    )
    parser.add_argument(
        "--history", type=Path, help="where the histories go (default: a temporary directory)"
    )
    parser.add_argument("--storm", action="store_true", help="all kinds of faults mixed, with the next two:")
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument(
        "--explain-s", type=float, default=8.0, help="print what happened in pauses from this length on"
    )
    args = parser.parse_args()
    if args.shared_bytes is not None:
        os.environ["RLZMQ_MIN_SHARED_BYTES"] = str(args.shared_bytes)
    if args.storm:
        return main_storm(args)
    if args.how == "wait" and args.roles != ["learner"]:
        parser.error("--how wait is for --roles learner: an env that waits is a slow one for half a minute")
    if args.how == "hold" and "broker" in args.roles:
        parser.error("--how hold is for --roles runner learner")
    with contextlib.ExitStack() as stack:
        directory = args.history or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["RLZMQ_HISTORY"] = str(directory)
        from rlzmq.core import faults
        from tests.support.fault_history import HistoryError, check_history, read_history

        faults.arm("driver")
        start = time.monotonic()
        nemesis = asyncio.run(attack(args, directory))
        took_s = time.monotonic() - start
        try:
            verdict = check_history(read_history(directory))
        except HistoryError as error:
            print(f"BROKEN PROMISE: {error}")
            return 1
    print(verdict)
    if args.algo in ("dqn", "sac"):
        source = nemesis.result["learners"]["__all_modules__"]["batch_source"]
        lost = nemesis.result["accounting"]["dropped"].get("buffer_lost", 0)
        print(
            f"{lost} steps lost with dead ranks' buffers; ratio of drawn to taken in {source['train_ratio']:.4f}"
        )
    median_s = quantile(nemesis.update_s, 0.5)
    print(f"{took_s:.0f} s in all; an update takes {median_s * 1000:.0f} ms (median)")
    for name, table in (
        ("to the next committed update", nemesis.gaps_s),
        ("until replaced", nemesis.replaced_s),
    ):
        for role, values in sorted(table.items()):
            print(
                f"{role:8s} {len(values):4d} faults, {name}: p50 {quantile(values, 0.5):.3f} s, "
                f"p99 {quantile(values, 0.99):.3f} s, max {max(values):.3f} s"
            )
    if verdict.num_killed != args.kills:
        print(f"only {verdict.num_killed} of {args.kills} faults fired")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
