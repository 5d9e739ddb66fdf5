"""How the learner of an asynchronous run spends its time, and what it waits for: IMPALA and APPO.

CartPole-v1 with two runner processes and a learner process. For each update, in milliseconds: the learner
connector, the rest of the update, and the time between two updates, with the part of it in which the next batch had
not arrived. For each runner, the share of the time in which it samples or encodes what it sampled, so that the rest is
waiting; and the processor time of each process.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from scripts.bench._core import prioritize

if TYPE_CHECKING:
    import psutil


def report(options: argparse.Namespace) -> Iterator[str]:
    for name in ("impala", "appo"):
        yield busy_share(name, options.seconds or 30.0, options.autogroup)


def busy_share(name: str, seconds: float, autogroup: int | None) -> str:
    """Train for some seconds; return lines with the times of the learner, the runners and the cores."""
    import psutil

    from rlzmq import APPOConfig, IMPALAConfig
    from rlzmq.core.trace import read_trace

    config = (
        {"impala": IMPALAConfig, "appo": APPOConfig}[name]()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=2, num_envs_per_env_runner=5)
        .learners(num_learners=1)
        .reporting(min_time_s_per_iteration=2)
        .debugging(seed=0)
    )
    times: dict[str, list[float]] = {"connector": [], "update": [], "between": []}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace")
        with config.debugging(trace=str(path)).build_algo() as algo:
            result = algo.train()
            before = result["num_env_steps_sampled_lifetime"]
            processes = {
                str(event["args"]["name"]): psutil.Process(event["pid"])
                for event in read_trace(path)
                if event["name"] == "process_name"
            }
            prioritize(processes.values(), autogroup)
            cpu_before = {role: _cpu_s(process) for role, process in processes.items()}
            version = result["learners"]["__all_modules__"]["weights_seq_no"]
            psutil.cpu_percent()
            began_at = time.perf_counter()
            while (elapsed_s := time.perf_counter() - began_at) < seconds:
                result = algo.train()
                timers, learners = result["timers"], result["learners"]["__all_modules__"]
                times["connector"].append(learners["learner_connector"]["connector_pipeline_timer"])
                times["update"].append(timers["learner_thread_update_timer"])
                times["between"].append(timers["learner_thread_in_queue_wait_timer"])
            all_cores = psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1)
            cpu_s = {role: _cpu_s(process) - cpu_before[role] for role, process in processes.items()}
            num_updates = learners["weights_seq_no"] - version
            steps = result["num_env_steps_sampled_lifetime"] - before
        events = [
            event
            for event in read_trace(path)
            if began_at <= event.get("ts", 0.0) * 1e-6 <= began_at + elapsed_s
        ]
    connector, update, between = (1e3 * statistics.fmean(values) for values in times.values())
    lines = [
        f"{name:7} busy {update / (update + between):.2f}: connector {connector:.1f} ms, rest of the update "
        f"{update - connector:.1f} ms, between updates {between:.1f} ms ({_missing_ms(events):.1f} ms of it without a "
        f"batch); {steps / elapsed_s:,.0f} env steps/s"
    ]
    for role, process in processes.items():
        own = [event for event in events if event["pid"] == process.pid and event["ph"] == "X"]
        sampling_s = sum(event["dur"] for event in own if event["name"] in ("sample", "encode")) * 1e-6
        share = f", samples for {sampling_s / elapsed_s:.0%} of the time" if sampling_s else ""
        lines.append(f"        {role:12} {_processor(cpu_s[role], elapsed_s, num_updates)}{share}")
    used = _processor(sum(cpu_s.values()), elapsed_s, num_updates)
    lines.append(f"        {'all':12} {used}; with other work {all_cores:.2f} of {psutil.cpu_count()} cores")
    return "\n".join(lines)


def _cpu_s(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


def _processor(cpu_s: float, elapsed_s: float, num_updates: int) -> str:
    return f"{cpu_s / elapsed_s:.2f} cores, {1e3 * cpu_s / num_updates:.1f} ms of processor time per update"


def _missing_ms(events: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean time after an update in which fragments of the next one had not all been decoded."""
    decoded: dict[int, list[float]] = defaultdict(list)
    arrived: dict[float, float] = {}  # by begin of an update: when its last fragment was decoded
    for event in events:
        if event["name"] == "decode":
            decoded[crc32(event["args"]["fragment"].encode())].append(event["ts"] + event["dur"])
        elif event["ph"] == "f":
            times = [time for time in decoded[event["id"]] if time <= event["ts"]]
            arrived[event["ts"]] = max([arrived.get(event["ts"], 0.0), *times[-1:]])
    updates = sorted((event["ts"], event["dur"]) for event in events if event["name"] == "train")
    waits = [
        max(0.0, arrived.get(begin, 0.0) - earlier - took)
        for (earlier, took), (begin, _) in itertools.pairwise(updates)
    ]
    return 1e-3 * statistics.fmean(waits)
