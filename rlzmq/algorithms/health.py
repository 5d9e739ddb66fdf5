"""Health: what stops a run from learning, as far as its results show: cause and remedy of each.

A check reads numbers that results have anyway, and is believed when it holds in several results in a row. Limits are
far from what runs that learn show (`tests/algorithms/test_health.py` tries both).

A synchronous run samples, sends, trains and sends weights one after the other, so these parts add up to the time per
update. In an asynchronous run they overlap, and the part closest to 1 limits the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.names import NUM_ENV_STEPS_SAMPLED_LIFETIME
from rlzmq.core.timers import (
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
from rlzmq.learners.schedule import Schedule
from rlzmq.runners.episode_metrics import HOW_TO_LIMIT

__all__ = [
    "Bottleneck",
    "Finding",
    "HealthWatch",
    "Verdict",
    "judge",
]


_PATIENCE = 3  # results in a row
_STEPS_WITHOUT_END = 2000  # per environment
_EPISODES_WITHOUT_REWARD = 50


class Finding(NamedTuple):
    """A reason why a run does not learn.

    Attributes:
        cause: What is seen, with the number that shows it.
        remedy: What to change, with names of settings.
    """

    cause: str
    remedy: str


@dataclass(frozen=True)
class _Seen:
    """What the checks of one module read: its config and results, and what was first seen of both in the run."""

    config: BaseConfig
    values: Mapping[str, Any]
    first: Mapping[str, Any]
    result: Mapping[str, Any]
    has_improved: bool

    def number(self, name: str) -> float:
        """Return one of the module's results; NaN if it is missing."""
        return _number(self.values.get(name))

    def setting(self, name: str) -> Any:
        """Return a setting; None if the algorithm has none of this name."""
        return getattr(self.config, name, None)

    @property
    def largest_return(self) -> float:
        runners = self.result["env_runners"]
        returns = [abs(_number(runners.get(f"episode_return_{kind}"))) for kind in ("min", "max")]
        return max((value for value in returns if math.isfinite(value)), default=0.0)


def _value_gradients_clipped(seen: _Seen) -> Finding | None:
    share = seen.number("vf_clip_fraction")
    if share > 0.5:
        return Finding(
            f"vf_clip_param={seen.setting('vf_clip_param'):g} leaves {share:.0%} of the rows without a gradient of the "
            "value function: their squared errors are larger",
            "Set vf_clip_param=None, or scale rewards",
        )
    return None


def _rewards_too_large(seen: _Seen) -> Finding | None:
    error, values = math.sqrt(seen.number("vf_loss_unclipped")), seen.number("vf_explained_var")
    is_behind = abs(values) < 0.01
    if math.isnan(error):
        error, values = seen.number("td_error_mean"), seen.number("qf_mean")
        is_behind = error > 0.5 * abs(values)
    if error > 1000.0 and is_behind:
        return Finding(
            f"values are wrong by {error:.2g} on average, as much as returns vary: networks cannot follow rewards of "
            "this size",
            "Scale rewards, for example with wrappers=['RecordEpisodeStatistics', 'NormalizeReward']",
        )
    return None


def _entropy_gone(seen: _Seen) -> Finding | None:
    entropy, before = seen.number("entropy"), _number(seen.first.get("entropy"))
    if entropy < 0.0:  # of a density
        is_gone = entropy < before - 3.5 * max(1.0, abs(before) / 1.42)
    else:
        is_gone = entropy < 0.03 * before
    if is_gone and not seen.has_improved:
        return Finding(
            f"the policy's entropy fell from {before:.3g} to {entropy:.3g} before returns rose: it no longer explores",
            "Lower lr, or raise entropy_coeff",
        )
    return None


def _ratios_clipped(seen: _Seen) -> Finding | None:
    share = seen.number("clip_fraction")
    if share > 0.8:
        return Finding(
            f"{share:.0%} of the probability ratios are outside of 1 ± clip_param={seen.setting('clip_param'):g}: "
            "the policy has no gradient there",
            "Lower lr or num_epochs, or raise minibatch_size",
        )
    return None


def _no_advantages(seen: _Seen) -> Finding | None:
    spread = seen.number("advantages_std")
    if spread < 1e-3:
        return Finding(
            f"advantages do not vary (standard deviation {spread:.1g}), so there is nothing to learn from",
            "Look at the rewards: they are the same whatever the agent does",
        )
    return None


def _kl_too_high(seen: _Seen) -> Finding | None:
    divergence = seen.number("mean_kl_loss")
    if math.isnan(divergence):
        return None
    target = _number(seen.setting("kl_target"))
    if divergence > max(30.0 * target, 0.3):
        return Finding(
            f"an update moves the policy by a KL divergence of {divergence:.3g}, far above kl_target={target:g}",
            "Lower lr or num_epochs, or set target_kl",
        )
    return None


def _outside_of_support(seen: _Seen) -> Finding | None:
    share = seen.number("targets_outside_support")
    if share > 0.25:
        return Finding(
            f"{share:.0%} of the targets are outside of v_min={seen.setting('v_min'):g} … "
            f"v_max={seen.setting('v_max'):g}, where the atoms end",
            "Set v_min and v_max to the smallest and the largest discounted return",
        )
    return None


def _gradients_clipped(seen: _Seen) -> Finding | None:
    clip = _number(seen.setting("grad_clip"))
    if seen.setting("grad_clip_by") != "global_norm":
        return None
    for name, value in seen.values.items():
        if name.startswith("gradients_") and name.endswith("_global_norm") and _number(value) > 1000.0 * clip:
            return Finding(
                f"gradients have a norm of {value:.3g}, grad_clip={clip:g} cuts all of them to a fraction",
                "Raise grad_clip, scale rewards, or lower vf_loss_coeff",
            )
    return None


def _no_gradients(seen: _Seen) -> Finding | None:
    norms = [
        _number(value)
        for name, value in seen.values.items()
        if name.startswith("gradients_") and name.endswith("_global_norm")
    ]
    if norms and max(norms) < 1e-12:
        return Finding(
            "all gradients are 0: the loss does not depend on the parameters, or rewards are always 0",
            "Look at compute_loss_for_module, at clip_param and at the rewards",
        )
    return None


def _no_learning_rate(seen: _Seen) -> Finding | None:
    rates = [value for name, value in seen.values.items() if name.endswith("_learning_rate")]
    before = [value for name, value in seen.first.items() if name.endswith("_learning_rate")]
    if rates and max(rates) == 0.0 and max(before) == 0.0:
        return Finding("the learning rate is 0", "Set lr")
    return None


def _values_diverge(seen: _Seen) -> Finding | None:
    mean, horizon = seen.number("qf_mean"), 1.0 / max(1.0 - seen.config.gamma, 1e-6)
    runners = seen.result["env_runners"]
    reward = abs(_number(runners.get("episode_return_mean"))) / _number(runners.get("episode_len_mean"))
    bonus = abs(seen.number("alpha_value") * seen.number("logps_mean"))  # part of SAC's values
    largest = max(seen.largest_return, horizon * reward) + (0.0 if math.isnan(bonus) else horizon * bonus)
    if abs(mean) > 10.0 + 3.0 * largest:
        return Finding(
            f"action values have a mean of {mean:.3g}, while returns allow at most {largest:.3g}: they diverge",
            "Lower the critic's learning rate or tau, or raise target_network_update_freq",
        )
    return None


def _epsilon_stuck(seen: _Seen) -> Finding | None:
    if "td_error_mean" not in seen.values or (epsilon := seen.setting("epsilon")) is None:
        return None
    last = Schedule(epsilon, "epsilon").values[-1]
    if last > 0.5:
        return Finding(
            f"epsilon ends at {last:g}: more than half of the actions are random throughout the run",
            "Set epsilon=[(0, 1.0), (10_000, 0.05)]",
        )
    return None


def _alpha_stuck(seen: _Seen) -> Finding | None:
    alpha, before = seen.number("alpha_value"), _number(seen.first.get("alpha_value"))
    entropy, target = -seen.number("logps_mean"), seen.number("target_entropy")
    if abs(alpha - before) < 1e-4 * before and abs(entropy - target) > 1.0 + 0.5 * abs(target):
        return Finding(
            f"the temperature stays at {alpha:.3g} while the policy's entropy is {entropy:.3g}, far from its target "
            f"{target:.3g}",
            "Raise alpha_lr",
        )
    if alpha > 100.0 + seen.largest_return:
        return Finding(
            f"the temperature grew to {alpha:.3g}: entropy counts for more than any reward",
            "Set target_entropy to what the policy can reach, or lower alpha_lr",
        )
    return None


_CHECKS: dict[str, Callable[[_Seen], Finding | None]] = {
    "no advantages": _no_advantages,
    "no learning rate": _no_learning_rate,
    "no gradients": _no_gradients,
    "ratios clipped": _ratios_clipped,
    "KL too high": _kl_too_high,
    "entropy gone": _entropy_gone,
    "value gradients clipped": _value_gradients_clipped,
    "rewards too large": _rewards_too_large,
    "targets outside of the support": _outside_of_support,
    "values diverge": _values_diverge,
    "gradients clipped": _gradients_clipped,
    "epsilon stuck": _epsilon_stuck,
    "alpha stuck": _alpha_stuck,
}


class HealthWatch:
    """Examines the results of a run, in order.

    Args:
        config: The run's config.
    """

    def __init__(self, config: BaseConfig) -> None:
        self._config = config
        self._num_envs = max(config.num_env_runners, 1) * config.num_envs_per_env_runner
        self._config_of: dict[str, BaseConfig] = {}  # modules
        self._first: dict[str, Mapping[str, Any]] = {}
        self._returns_to_beat = math.nan
        self._num_in_a_row: Counter[str] = Counter()

    def examine(self, result: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        """Return what is wrong, by the check's name: ``{"cause", "remedy"}``, the likeliest root first."""
        runners = result["env_runners"]
        mean = _number(runners.get("episode_return_mean"))
        if math.isnan(self._returns_to_beat):
            # Halfway from the first mean to the best of the first episodes: luck does not lead there.
            self._returns_to_beat = 0.5 * (mean + _number(runners.get("episode_return_max")))
        found: dict[str, tuple[int, Finding]] = dict(self._of_run(result))
        for module_id, values in result["learners"].items():
            if module_id.startswith("__") or not isinstance(values, Mapping):
                continue
            first = self._first[module_id] = {**values, **self._first.get(module_id, {})}
            if (config := self._config_of.get(module_id)) is None:
                config = self._config_of[module_id] = self._config.get_config_for_module(module_id)
            seen = _Seen(config, values, first, result, mean > self._returns_to_beat)
            for name, check in _CHECKS.items():
                if name not in found and (finding := check(seen)) is not None:
                    where = f"module {module_id!r}: " if len(self._first) > 1 else ""
                    found[name] = _PATIENCE, finding._replace(cause=where + finding.cause)
        self._num_in_a_row = Counter({name: self._num_in_a_row[name] + 1 for name in found})
        return {
            name: finding._asdict()
            for name, (patience, finding) in found.items()
            if self._num_in_a_row[name] >= patience
        }

    def _of_run(self, result: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, Finding]]]:
        runners = result["env_runners"]
        num_steps, num_episodes = (
            result[NUM_ENV_STEPS_SAMPLED_LIFETIME],
            runners.get("num_episodes_lifetime", 0),
        )
        if not num_episodes and num_steps >= _STEPS_WITHOUT_END * self._num_envs:
            envs = "1 environment" if self._num_envs == 1 else f"{self._num_envs} environments"
            yield (
                "no episode ends",
                (
                    1,
                    Finding(
                        f"No episode has ended in {num_steps} env steps of {envs}, so there is no episode_return_mean",
                        f"If they never end, limit them: {HOW_TO_LIMIT}",
                    ),
                ),
            )
        mean = runners.get("episode_return_mean", 0.0)
        if num_episodes and not math.isfinite(mean):
            yield (
                "returns not finite",
                (
                    _PATIENCE,
                    Finding(f"episode_return_mean is {mean}", "Look at the rewards of the environment"),
                ),
            )
        extremes = [runners.get(f"episode_return_{kind}") for kind in ("min", "max")]
        has_rewards = extremes != [0.0, 0.0] or any(runners.get("agent_episode_return_mean", {}).values())
        if num_episodes >= _EPISODES_WITHOUT_REWARD and not has_rewards:
            yield (
                "no rewards",
                (
                    _PATIENCE,
                    Finding(
                        f"the newest of {num_episodes} episodes had no reward, so there is nothing to learn from",
                        "Reward steps towards the goal, or explore more (entropy_coeff, epsilon)",
                    ),
                ),
            )
        dropped = sum(
            number for reason, number in result["accounting"]["dropped"].items() if reason != "stopped"
        )
        if dropped > 0.5 * max(num_steps, 1000):
            yield (
                "steps dropped",
                (
                    _PATIENCE,
                    Finding(
                        f"{dropped} of {num_steps} sampled env steps were dropped",
                        "See accounting/dropped for the reasons",
                    ),
                ),
            )


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


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
