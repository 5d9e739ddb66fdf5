"""Verdict: what limits a run's speed, according to the timers of one iteration.

A synchronous run samples, sends, trains and sends weights one after the other, so these parts add up to the time per
update. In an asynchronous run they overlap, and the part closest to 1 limits the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlzmq.core.stage_timers import (
    ENV_RESET_TIMER,
    ENV_STEP_TIMER,
    ENV_TO_MODULE_TIMER,
    FRAGMENT_DELIVERY_TIMER,
    FRAGMENT_ENCODE_TIMER,
    INFERENCE_TIMER,
    LEARNER_STAGES,
    MODULE_TO_ENV_TIMER,
    NUM_VECTOR_STEPS_PER_SAMPLE,
    VECTOR_STEPS_TIMER,
    WEIGHTS_WAIT_TIMER,
)

__all__ = ["Bottleneck", "Verdict", "judge"]

Bottleneck = Literal[
    "env",
    "inference",
    "connectors",
    "callbacks",
    "one slow runner",
    "transport",
    "learner",
    "reduce",
    "driver",
    "unknown",
]

# A runner is slow if it samples at less than this fraction of the median speed.
_SLOW = 0.5
# Runners slower than the median must lose at least this fraction of what all could sample to be the bottleneck.
_LOST = 0.25


@dataclass(frozen=True)
class Verdict:
    """What limits a run.

    Attributes:
        bottleneck: The stage that takes the largest part of the time.
        advice: One sentence on what to change.
        shares: Fractions of time. ``"update"``: fractions of the time per update, by part of the run: ``env_runners``
            (mean busy time of the runners), ``slow_runners`` (waiting for the slowest), ``transport``, ``learners``,
            ``driver``. ``"env_runners"``: fractions of a runner's time, by stage: env, inference, connectors, other,
            encode, deliver, wait. ``"learners"``: fractions of a learner's time: connector, forward, backward,
            reduce, other, wait. Each role's stages add up to 1. Empty if nothing was measured.
    """

    bottleneck: Bottleneck
    advice: str
    shares: Mapping[str, Mapping[str, float]]

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as in results: ``{"stage", "advice", "shares"}``."""
        shares = {role: dict(of_role) for role, of_role in self.shares.items()}
        return {"stage": self.bottleneck, "advice": self.advice, "shares": shares}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Verdict:
        """Return the verdict in a result's ``"bottleneck"``."""
        return cls(value["stage"], value["advice"], value["shares"])


def judge(result: Mapping[str, Any]) -> Verdict:
    """Return what limited the iteration with this result.

    Args:
        result: A result of `train()`, or one read from a run directory's ``metrics.jsonl``.
    """
    if "bottleneck" in result:
        return Verdict.from_dict(result["bottleneck"])
    runners, timers = _numbers(result.get("env_runners", {})), _numbers(result.get("timers", {}))
    of_runners, of_learners = _runner_shares(runners), _learner_shares(timers)
    update = _update_shares(runners, timers, of_runners, of_learners)
    shares = {"update": update, "env_runners": of_runners, "learners": of_learners}
    shares = {role: of_role for role, of_role in shares.items() if of_role}
    if not update:
        return Verdict("unknown", "Nothing was timed in this iteration.", shares)
    speed = result.get("env_runners", {}).get("runner_speed", {})
    stage = _stage(shares, speed)
    return Verdict(stage, _advice(stage, shares, speed), shares)


def _numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a nested dict by path."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            found[f"{prefix}{name}"] = float(value)
    return found


def _runner_shares(runners: Mapping[str, float]) -> dict[str, float]:
    sample_s, between_s = runners.get("sample", 0.0), runners.get("time_between_sampling", 0.0)
    cycle_s = sample_s + between_s
    if not (sample_s > 0 and between_s >= 0):  # external runners may send any numbers
        return {}
    num_steps = runners.get(NUM_VECTOR_STEPS_PER_SAMPLE, 0.0)
    stages = {
        "env": num_steps * runners.get(ENV_STEP_TIMER, 0.0),
        "inference": num_steps * runners.get(INFERENCE_TIMER, 0.0),
        "connectors": num_steps
        * (runners.get(ENV_TO_MODULE_TIMER, 0.0) + runners.get(MODULE_TO_ENV_TIMER, 0.0)),
    }
    # Fused sampling times all steps together, and one in sixteen steps by stage.
    whole_s = min(runners.get(VECTOR_STEPS_TIMER, sum(stages.values())), sample_s)
    scale = whole_s / max(sum(stages.values()), 1e-12)
    stages = {name: seconds * scale for name, seconds in stages.items()}
    other_s = sample_s - sum(stages.values())
    reset_s = min(runners.get(ENV_RESET_TIMER, 0.0), other_s)
    stages["env"] += reset_s
    stages["other"] = other_s - reset_s
    stages["encode"] = min(runners.get(FRAGMENT_ENCODE_TIMER, 0.0), between_s)
    idle_s = between_s - stages["encode"]
    delivery_s = runners.get(FRAGMENT_DELIVERY_TIMER, 0.0) + runners.get(WEIGHTS_WAIT_TIMER, 0.0)
    stages["deliver"] = min(delivery_s, idle_s)
    stages["wait"] = idle_s - stages["deliver"]
    return {name: max(seconds, 0.0) / cycle_s for name, seconds in stages.items()}


def _learner_shares(timers: Mapping[str, float]) -> dict[str, float]:
    busy_s, wait_s = (
        timers.get("learner_thread_update_timer", 0.0),
        timers.get("learner_thread_in_queue_wait_timer", 0.0),
    )
    if not busy_s:
        return {}
    names = ("learner_connector_timer", *LEARNER_STAGES)
    stages = {name.split("_")[1]: timers.get(name, 0.0) for name in names}
    stages["other"] = max(busy_s - sum(stages.values()), 0.0)
    stages["wait"] = wait_s
    whole_s = sum(stages.values())
    return {name: seconds / whole_s for name, seconds in stages.items()}


def _update_shares(
    runners: Mapping[str, float],
    timers: Mapping[str, float],
    of_runners: Mapping[str, float],
    of_learners: Mapping[str, float],
) -> dict[str, float]:
    """Return the parts of the time per update."""
    if not of_runners and not of_learners:
        return {}
    busy = sum(of_runners.get(name, 0.0) for name in ("env", "inference", "connectors", "other", "encode"))
    busy = runners.get("runner_speed/busy_mean", busy)
    slowest = max(busy, runners.get("runner_speed/busy_max", 0.0))
    learns = 1.0 - of_learners["wait"] if of_learners else 0.0
    idle = max(0.0, 1.0 - slowest - learns)
    driver = min(idle, _driver_share(timers))
    return {
        "env_runners": busy,
        "slow_runners": slowest - busy,
        # Asynchronous runs may be limited by delivery although all parts overlap.
        "transport": max(idle - driver, of_runners.get("deliver", 0.0)) if "update" in timers else 0.0,
        "learners": learns,
        "driver": driver if "update" in timers else idle,
    }


def _driver_share(timers: Mapping[str, float]) -> float:
    """Return the fraction of the time in which no update was open, or training did not progress."""
    cycle_s = timers.get("learner_thread_update_timer", 0.0) + timers.get(
        "learner_thread_in_queue_wait_timer", 0.0
    )
    open_s = timers.get("env_runner_sampling_timer", 0.0) + timers.get("learner_update_timer", 0.0)
    return max(0.0, 1.0 - open_s / cycle_s) if cycle_s and open_s else 0.0


def _stage(shares: Mapping[str, Mapping[str, float]], speed: Mapping[str, Any]) -> Bottleneck:
    update, of_runners = shares["update"], shares.get("env_runners", {})
    parts = {**update, "env_runners": update["env_runners"] + update["slow_runners"]}
    del parts["slow_runners"]
    largest = max(parts, key=parts.__getitem__)
    if largest == "transport":
        return "transport"
    if largest == "driver":
        return "driver"
    if largest == "learners":
        of_learners = shares["learners"]
        return "reduce" if of_learners["reduce"] > 0.5 * update["learners"] else "learner"
    if is_slow(speed) and (_lost(speed) > _LOST or update["slow_runners"] > update["env_runners"]):
        return "one slow runner"
    stages: dict[Bottleneck, float] = {
        "env": of_runners["env"],
        "inference": of_runners["inference"],
        "connectors": of_runners["connectors"],
        "callbacks": of_runners["other"],
    }
    if not any(stages[name] for name in ("env", "inference", "connectors")):
        return "unknown"  # no vector step was timed by stage
    return max(stages, key=stages.__getitem__)


def is_slow(speed: Mapping[str, Any]) -> bool:
    """Return whether the slowest runner is much slower than the others.

    Args:
        speed: A result's ``env_runners/runner_speed``; may be empty.
    """
    return bool(speed) and speed["min"] < _SLOW * speed["median"]


def _lost(speed: Mapping[str, Any]) -> float:
    """Return the lost fraction of what the runners could sample if all had the median speed."""
    return max(0.0, 1.0 - speed["mean"] / speed["median"]) if speed["median"] else 0.0


def _advice(stage: Bottleneck, shares: Mapping[str, Mapping[str, float]], speed: Mapping[str, Any]) -> str:
    update, of_runners = shares["update"], shares.get("env_runners", {})
    if stage == "env":
        return (
            f"Env steps take {_percent(of_runners['env'])} of the env runners' time: raise num_env_runners up to the "
            'number of cores, set gym_env_vectorize_mode="async" (or "vector_entry_point", if the env has one), or '
            "make env.step() faster."
        )
    if stage == "inference":
        return (
            f"The module's forward passes take {_percent(of_runners['inference'])} of the env runners' time: raise "
            "num_envs_per_env_runner, so that one pass serves more envs, make the network smaller (model_config), or "
            "raise num_env_runners."
        )
    if stage == "connectors":
        return (
            f"Connector pieces take {_percent(of_runners['connectors'])} of the env runners' time: "
            "reporting(connector_timers=True) times each of them; raise num_envs_per_env_runner if they work on whole "
            "batches, or num_env_runners."
        )
    if stage == "callbacks":
        return (
            f"{_percent(of_runners['other'])} of the env runners' time is spent outside of env, module and connectors: "
            "look at the callbacks of episodes and samples, and raise rollout_fragment_length if fragments are short."
        )
    if stage == "one slow runner":
        return (
            f"Env runner {speed['slowest']} samples {speed['min']:.0f} env steps/s, the median is "
            f"{speed['median']:.0f}: look at its machine and at what its env does (env_config.worker_index), or run "
            "without it (num_env_runners)."
        )
    if stage == "transport":
        return (
            f"Data is on its way for {_percent(update['transport'])} of the time: store smaller observations (uint8 or "
            "float16, environment(wrappers=…)), run env runners and learners nearer to the broker, or let sampling "
            "continue during updates with staleness=1."
        )
    if stage == "reduce":
        return (
            f"Learners wait {_percent(shares['learners']['reduce'])} of their time for each other's gradients: raise "
            "minibatch_size, use fewer ranks (num_learners), or connect them faster."
        )
    if stage == "learner":
        return _learner_advice(shares["learners"], update["learners"])
    if stage == "driver":
        return (
            f"No update is open for {_percent(update['driver'])} of the time: look at the driver's callbacks, set "
            "evaluation_parallel_to_training=True, or write fewer checkpoints (checkpoint_every_s)."
        )
    return "Env runners take most of the time, but too few steps were timed to tell what of them."


def _learner_advice(of_learners: Mapping[str, float], busy: float) -> str:
    if of_learners["connector"] > 0.5 * busy:
        return (
            f"The learner connector takes {_percent(of_learners['connector'])} of the learners' time: look at its "
            "pieces (learner_connector; their timers are in the result), or raise num_learners."
        )
    return (
        f"Learners train for {_percent(busy)} of the time: lower num_epochs, raise minibatch_size or num_learners, "
        "train on a GPU (num_gpus_per_learner=1), or let sampling continue during updates with staleness=1."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if math.isfinite(share) else "?"
