"""``rlzmq top`` and ``rlzmq stacks``: what a living run does."""

from __future__ import annotations

import asyncio
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from rlzmq.actors.process_state import descendants
from rlzmq.cli.parsing import command
from rlzmq.core.errors import ConfigurationError, printable
from rlzmq.core.process import find_stack_channel, read_stacks
from rlzmq.telemetry.view import LiveView, View, size_text

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["format_status", "stacks", "top"]


_STILL_S = 10.0  # without an env step or a learner step


@dataclass
class TopOptions:
    """Options of ``rlzmq top``."""

    where: tyro.conf.Positional[str] = ""
    """A run directory, a join file, a run's private directory, or ipc:///path of its data socket (default: the newest
    run of this user on this machine)."""
    interval: float = 1.0
    """Seconds between two updates (default: 1)."""
    count: int = 0
    """End after this many updates (default: 0, never)."""
    timeout: float = 5.0
    """Seconds to wait for the broker's answer (default: 5)."""


@command(
    TopOptions,
    usage="rlzmq top [RUN | FILE | DIRECTORY | ADDRESS] [options]",
    description="Watch a run in progress.",
)
def top(options: TopOptions) -> int:
    if not 0 < options.interval < 1e6:
        raise ConfigurationError(f"--interval: expected more than 0 seconds, got {options.interval:g}")
    return asyncio.run(_main(options))


async def _main(options: TopOptions) -> int:
    from rlzmq.roles.remote_peer import Observer
    from rlzmq.telemetry.dashboard.watched import Rates, find_broker

    address, join = find_broker(options.where)
    rates = Rates()
    num_updates = 0
    async with Observer(address, join) as observer:
        with _Screen() if sys.stdout.isatty() else _Lines() as view:
            while True:
                status = await observer.status(timeout_s=options.timeout)
                view.show(format_status(status, rates.update(status, time.monotonic()), address))
                num_updates += 1
                if num_updates == options.count:
                    return 0
                await asyncio.sleep(options.interval)


def format_status(status: Mapping[str, Any], rates: Mapping[str, float], address: str) -> list[str]:
    """Format a broker's status, one fact per line."""
    account, weights = status["accounting"], status["weights"]
    dropped = account["dropped"]
    version = f"{weights[1]} (generation {weights[0]})" if weights else "none"
    yes = "yes" if status["has_driver"] else "NO"
    lines = [
        f"run {status['run_id'][:8]} at {address}   driver {yes}   weights version {version}",
        f"steps     sampled {account['sampled']}  trained {account['trained']}  "
        f"dropped {sum(dropped.values())}  pending {account['pending']}",
        "rates     "
        + (f"{rates['sampled']:.0f} sampled/s  {rates['trained']:.0f} trained/s" if rates else "-"),
        "drops     " + (_pairs(dropped) or "none"),
        f"updates   next commit {status['next_commit']}  open {len(status['open_updates'])}  "
        f"in flight {len(status['updates_in_flight'])}",
        f"queues    {status['num_fragments_held']} fragments, {size_text(status['fragment_bytes'])} held, "
        f"the oldest for {status['oldest_fragment_s']:.1f} s  "
        f"{status['num_env_steps_leased']} steps leased  {status['num_duplicates']} duplicates",
        f"broker    loop lag {status['loop_lag_s'] * 1e3:.1f} ms, at most {status['max_loop_lag_s'] * 1e3:.0f} ms  "
        f"{status['num_messages']} messages  refused {_pairs(status['refused']) or 'none'}",
    ]
    if status["bottleneck"]:
        lines.append(f"bottleneck  {status['bottleneck']}")
    if status["still_s"] >= _STILL_S:
        lines.append(
            f"STANDS STILL  nothing has moved for {status['still_s']:.0f} s; what each peer waits for:"
        )
        lines += [f"  {line}" for line in status["waits"]]
    if door := status["connections"]:
        refused = {**door["refused_keys"], **door["failed_handshakes"]}
        turned_away = door["opened"] - door["let_in"]
        lines.append(
            f"door      {door['let_in']} let in  {turned_away} turned away: {_pairs(refused) or '-'}"
        )
    lines.append(f"{'runner':<34}{'steps':>10}{'steps/s':>9}{'leases':>8}{'oldest':>9}{'unacked':>9}  state")
    for runner in status["runners"]:
        rate = f"{rates[runner['name']]:.0f}" if runner["name"] in rates else "-"
        state = "suspect" if runner["is_suspect"] else "ok"
        bad = f", {runner['num_bad']} bad" if runner["num_bad"] else ""
        lines.append(
            f"{runner['name'][:33]:<34}{runner['num_env_steps']:>10}{rate:>9}{runner['num_leases']:>8}"
            f"{runner['oldest_lease_s']:>7.1f} s{runner['num_uncommitted']:>9}  {state}{bad}"
        )
    for learner in status["learners"]:
        lag = (status["next_commit"] or 0) - learner["next_update"]
        lines.append(
            f"{learner['name'][:33]:<34}rank {learner['rank']}  update {learner['next_update']}  lag {lag}"
        )
    return [printable(line) for line in lines]


def _pairs(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()) if count)


class _Lines(View[Sequence[str]]):
    """Prints each status below the one before."""

    def show(self, shown: Sequence[str]) -> None:
        print("\n".join(shown), flush=True)


class _Screen(LiveView[Sequence[str]]):
    """Shows the newest status in place on a terminal; long lines are cut in a narrow window."""

    def draw(self, shown: Sequence[str]) -> RenderableType:
        from rich.text import Text

        return Text("\n".join(shown), no_wrap=True, overflow="ellipsis")


@dataclass
class StacksOptions:
    """Options of ``rlzmq stacks``."""

    run: tyro.conf.Positional[Path]
    """The run directory."""


@command(
    StacksOptions,
    usage="rlzmq stacks RUN",
    description="Show the stacks of all threads of a run's driver, broker, runners and learners on this machine.",
)
def stacks(options: StacksOptions) -> int:
    from rlzmq.telemetry.runs import Run

    found = Run.open(options.run)
    host, pid = found.facts.get("host"), found.facts.get("pid")
    if host != platform.node():
        raise ConfigurationError(f"{options.run}: its driver ran on {host}; run rlzmq stacks there.")
    if found.state != "running" or not isinstance(pid, int):
        raise ConfigurationError(f"{options.run}: its driver has ended: there are no stacks.")
    for process in (pid, *descendants(pid)):
        channel = find_stack_channel(process)
        if channel is None:  # e.g. the fork server, a tracker, an environment's process, or a script
            continue
        role, file = channel
        print(printable(f"=== {role} (pid {process})"))
        try:
            stacks = read_stacks(process, file)
        except OSError:
            stacks = "it has ended\n"
        print(printable(stacks.rstrip() or "no answer: it is stopped, or swapped out", keep="\n"), end="\n\n")
    return 0
