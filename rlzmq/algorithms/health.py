"""Health: what stops a run from learning, and what limits its speed, as far as its results show.

A check compares one number of results with a limit, and is believed when it holds in several results in a row. Limits
are far from what runs that learn show (`tests/algorithms/test_health.py` tries both).

A synchronous run samples, sends, trains and sends weights one after the other, so these parts add up to the time per
update. In an asynchronous run they overlap, and the part closest to 1 limits the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.metrics import (
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
from rlzmq.core.names import NUM_ENV_STEPS_SAMPLED_LIFETIME
from rlzmq.core.update_plan import Schedule
from rlzmq.runners.episode_metrics import HOW_TO_LIMIT

__all__ = ["Bottleneck", "HealthWatch", "judge"]


class _Check(NamedTuple):
    """A symptom of a run or of one of its modules.

    Attributes:
        name: Key in ``result["health"]``.
        number: What is compared: a learner's result, or a number made by `_run_numbers` or `_module_numbers`.
        above, below: The symptom holds if the number is beyond one of them; never if it is missing or NaN.
        cause: What is seen: a format string for the numbers.
        remedy: What to change, with names of settings.
        patience: In how many results in a row it must hold.
    """

    name: str
    number: str
    cause: str
    remedy: str
    above: float = math.inf
    below: float = -math.inf
    patience: int = 3


_CHECKS = [  # the likeliest root first
    _Check(
        "no episode ends",
        "steps_without_end",  # per environment
        "No episode has ended in {num_steps} env steps ({steps_without_end:.0f} in each environment), so there is no "
        "episode_return_mean",
        f"If they never end, limit them: {HOW_TO_LIMIT}",
        above=1999.9,
        patience=1,
    ),
    _Check(
        "returns not finite",
        "returns_not_finite",
        "episode_return_mean is {return_mean}",
        "Look at the rewards of the environment",
        above=0.0,
    ),
    _Check(
        "no rewards",
        "num_episodes_without_reward",
        "the newest of {num_episodes_without_reward} episodes had no reward, so there is nothing to learn from",
        "Reward steps towards the goal, or explore more (entropy_coeff, epsilon)",
        above=49,
    ),
    _Check(
        "steps dropped",
        "dropped_share",
        "{num_dropped} of {num_steps} sampled env steps were dropped",
        "See accounting/dropped for the reasons",
        above=0.5,
    ),
    _Check(
        "no advantages",
        "advantages_std",
        "advantages do not vary (standard deviation {advantages_std:.1g}), so there is nothing to learn from",
        "Look at the rewards: they are the same whatever the agent does",
        below=1e-3,
    ),
    _Check("no learning rate", "largest_lr", "the learning rate is 0", "Set lr", below=1e-30),
    _Check(
        "no gradients",
        "largest_gradient",
        "all gradients are 0: the loss does not depend on the parameters, or rewards are always 0",
        "Look at compute_loss_for_module, at clip_param and at the rewards",
        below=1e-12,
    ),
    _Check(
        "ratios clipped",
        "clip_fraction",
        "{clip_fraction:.0%} of the probability ratios are outside of 1 ± clip_param={clip_param:g}: the policy "
        "has no gradient there",
        "Lower lr or num_epochs, or raise minibatch_size",
        above=0.95,  # healthy runs with a narrow clip range and many epochs have up to 0.9
    ),
    *(
        _Check(
            "KL too high",
            "kl_to_limit",
            "an update moves the policy by a KL divergence of {mean_kl_loss:.3g}, far above "
            "kl_target={kl_target:g}",
            "Lower lr or num_epochs, or set target_kl",
            above=limit,
            patience=patience,
        )
        for limit, patience in ((3.0, 1), (1.0, 3))
    ),
    _Check(
        "entropy gone",
        "entropy_left",
        "the policy's entropy fell from {first_entropy:.3g} to {entropy:.3g} before returns rose: it no longer "
        "explores",
        "Lower lr, or raise entropy_coeff",
        below=0.0,
    ),
    _Check(
        "value gradients clipped",
        "vf_clip_fraction",
        "vf_clip_param={vf_clip_param:g} leaves {vf_clip_fraction:.0%} of the rows without a gradient of the "
        "value function: their squared errors are larger",
        "Set vf_clip_param=None, or scale rewards",
        above=0.5,
    ),
    _Check(
        "rewards too large",
        "error_of_unlearned_values",
        "values are wrong by {error_of_unlearned_values:.2g} on average, as much as returns vary: networks cannot "
        "follow rewards of this size",
        "Scale rewards, for example with wrappers=['RecordEpisodeStatistics', 'NormalizeReward']",
        above=1000.0,
    ),
    _Check(
        "targets outside of the support",
        "targets_outside_support",
        "{targets_outside_support:.0%} of the targets are outside of v_min={v_min:g} … "
        "v_max={v_max:g}, where the atoms end",
        "Set v_min and v_max to the smallest and the largest discounted return",
        above=0.25,
    ),
    _Check(
        "values diverge",
        "value_excess",
        "action values have a mean of {qf_mean:.3g}, while returns allow at most {largest_value:.3g}: they diverge",
        "Lower the critic's learning rate or tau, or raise target_network_update_freq",
        above=10.0,
    ),
    _Check(
        "gradients clipped",
        "gradient_to_clip",
        "gradients have a norm of {largest_gradient:.3g}, grad_clip={grad_clip:g} cuts all of them to a "
        "fraction",
        "Raise grad_clip, scale rewards, or lower vf_loss_coeff",
        above=1000.0,
    ),
    _Check(
        "epsilon stuck",
        "last_epsilon",
        "epsilon ends at {last_epsilon:g}: more than half of the actions are random throughout the run",
        "Set epsilon=[(0, 1.0), (10_000, 0.05)]",
        above=0.5,
    ),
    _Check(
        "alpha stuck",
        "entropy_off_target",
        "the temperature stays at {alpha_value:.3g} while the policy's entropy is far from its target "
        "{target_entropy:.3g}",
        "Raise alpha_lr",
        above=1.0,
    ),
    _Check(
        "alpha stuck",
        "alpha_excess",
        "the temperature grew to {alpha_value:.3g}: entropy counts for more than any reward",
        "Set target_entropy to what the policy can reach, or lower alpha_lr",
        above=100.0,
    ),
]


# Settings that the checks compare with, or name.
_SETTINGS = (
    "clip_param",
    "epsilon",
    "gamma",
    "grad_clip",
    "grad_clip_by",
    "kl_target",
    "v_max",
    "v_min",
    "vf_clip_param",
)


class HealthWatch:
    """Examines the results of a run, in order.

    Args:
        config: The run's config.
    """

    def __init__(self, config: BaseConfig) -> None:
        self._config = config
        self._settings_of: dict[str, dict[str, Any]] = {}  # modules
        self._first: dict[str, Mapping[str, Any]] = {}  # first values by module
        self._return_to_beat = math.nan
        self._num_in_a_row: Counter[str] = Counter()

    def examine(self, result: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        """Return what is wrong, by the check's name: ``{"cause", "remedy"}``, the likeliest root first."""
        of_run = _run_numbers(result, self._config)
        if math.isnan(self._return_to_beat):
            # Halfway from the first mean to the best of the first episodes: luck does not lead there.
            self._return_to_beat = 0.5 * (of_run["return_mean"] + of_run["return_max"])
        has_improved = of_run["return_mean"] > self._return_to_beat
        examined = [("", of_run)]
        for module_id, values in result["learners"].items():
            if module_id.startswith("__") or not isinstance(values, Mapping):
                continue
            first = self._first[module_id] = {**values, **self._first.get(module_id, {})}
            if (settings := self._settings_of.get(module_id)) is None:
                config = self._config.get_config_for_module(module_id)
                settings = self._settings_of[module_id] = {name: config.get(name) for name in _SETTINGS}
            numbers = _module_numbers(settings, values, first, of_run, has_improved)
            examined.append((f"module {module_id!r}: ", numbers))
        found: dict[str, dict[str, str]] = {}
        num_before, self._num_in_a_row = self._num_in_a_row, Counter()
        for where, numbers in examined:
            for check in _CHECKS:
                number = numbers.get(check.number, math.nan)
                if check.name in self._num_in_a_row or not (number > check.above or number < check.below):
                    continue
                self._num_in_a_row[check.name] = num_before[check.name] + 1
                if self._num_in_a_row[check.name] >= check.patience:
                    cause = check.cause.format_map(numbers)
                    place = where if len(self._first) > 1 else ""
                    found[check.name] = {"cause": place + cause, "remedy": check.remedy}
        return found


def _run_numbers(result: Mapping[str, Any], config: BaseConfig) -> dict[str, float]:
    """Return the numbers of the checks of a whole run."""
    runners = result["env_runners"]
    num_steps, num_episodes = result[NUM_ENV_STEPS_SAMPLED_LIFETIME], runners.get("num_episodes_lifetime", 0)
    num_envs = max(config.num_env_runners, 1) * config.num_envs_per_env_runner
    mean = _get(runners, "episode_return_mean", math.nan)
    low, high = _get(runners, "episode_return_min", math.nan), _get(runners, "episode_return_max", math.nan)
    has_rewards = (low, high) != (0.0, 0.0) or any(runners.get("agent_episode_return_mean", {}).values())
    dropped = result["accounting"]["dropped"]
    # A buffer that a checkpoint leaves out was said at the restore, and its steps were trained before.
    num_dropped = sum(dropped.values()) - dropped.get("stopped", 0) - dropped.get("buffer_lost", 0)
    return {
        "num_steps": num_steps,
        "num_dropped": num_dropped,
        "return_mean": mean,
        "return_max": high,
        "largest_return": max(map(abs, filter(math.isfinite, (low, high))), default=0.0),
        "length_mean": _get(runners, "episode_len_mean", math.nan),
        "steps_without_end": 0.0 if num_episodes else num_steps / num_envs,
        "returns_not_finite": num_episodes and "episode_return_mean" in runners and not math.isfinite(mean),
        "num_episodes_without_reward": 0 if has_rewards else num_episodes,
        "dropped_share": num_dropped / max(num_steps, 1000),
    }


def _module_numbers(
    settings: Mapping[str, Any],
    values: Mapping[str, Any],
    first: Mapping[str, Any],
    of_run: Mapping[str, float],
    has_improved: bool,
) -> dict[str, float]:
    """Return the numbers of the checks of one module: its results, its settings, and what follows from both."""
    nan = math.nan
    gradients, rates = [], []
    numbers: dict[str, float] = {}
    for name, setting in settings.items():
        numbers[name] = setting if isinstance(setting, int | float) else nan
    for name, value in values.items():
        if not isinstance(value, int | float):
            continue
        numbers[name] = value
        if name.startswith("gradients_") and name.endswith("_global_norm"):
            gradients.append(value)
        elif name.endswith("_learning_rate"):
            rates += [value, first[name]]
    largest_return = of_run["largest_return"]

    largest_gradient = max(gradients, default=nan)
    clips_norm = settings["grad_clip_by"] == "global_norm"

    entropy = numbers.get("entropy", nan)
    before = _get(first, "sampled_entropy", _get(first, "entropy", nan))  # the first update may end it
    is_density = entropy < 0.0
    least_entropy = before - 3.5 * max(1.0, abs(before) / 1.42) if is_density else 0.03 * before

    mean_value = numbers.get("qf_mean", nan)
    if "vf_loss_unclipped" in numbers:
        error = math.sqrt(numbers["vf_loss_unclipped"])
        is_behind = abs(numbers.get("vf_explained_var", nan)) < 0.01
    else:
        error = numbers.get("td_error_mean", nan)
        is_behind = error > 0.5 * abs(mean_value)

    alpha, logps = numbers.get("alpha_value", nan), numbers.get("logps_mean", nan)
    target, first_alpha = numbers.get("target_entropy", nan), _get(first, "alpha_value", nan)
    is_alpha_constant = abs(alpha - first_alpha) < 1e-4 * first_alpha
    horizon = 1.0 / max(1.0 - numbers["gamma"], 1e-6)
    reward = abs(of_run["return_mean"]) / of_run["length_mean"]
    bonus = 0.0 if math.isnan(alpha * logps) else horizon * abs(alpha * logps)  # part of SAC's values
    largest_value = max(largest_return, horizon * reward) + bonus

    epsilon = settings["epsilon"] if "td_error_mean" in numbers else None
    return numbers | {
        "largest_gradient": largest_gradient,
        "gradient_to_clip": largest_gradient / numbers["grad_clip"] if clips_norm else nan,
        "largest_lr": max(rates, default=nan),
        "kl_to_limit": numbers.get("mean_kl_loss", nan) / max(0.3, 30.0 * numbers["kl_target"]),
        "first_entropy": before,
        "entropy_left": nan if has_improved else entropy - least_entropy,
        "error_of_unlearned_values": error if is_behind else nan,
        "largest_value": largest_value,
        "value_excess": abs(mean_value) - 3.0 * largest_value,
        "last_epsilon": nan if epsilon is None else Schedule(epsilon, "epsilon").values[-1],
        "entropy_off_target": abs(-logps - target) - 0.5 * abs(target) if is_alpha_constant else nan,
        "alpha_excess": alpha - largest_return,
    }


def _get(values: object, path: str, default: float = 0.0) -> float:
    """Return the number at a path such as ``a/b`` of nested dicts."""
    for name in path.split("/"):
        values = values.get(name) if isinstance(values, Mapping) else None
    return float(values) if isinstance(values, int | float) else default


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

# Format strings for the shares of `judge`, and for ``env_runners/runner_speed``.
_ADVICE: dict[str, str] = {
    "env": "Env steps take {env_runners[env]:.0%} of the env runners' time: raise num_env_runners up to the number of "
    'cores, set gym_env_vectorize_mode="async" (or "vector_entry_point", if the env has one), or make env.step() '
    "faster.",
    "inference": "The module's forward passes take {env_runners[inference]:.0%} of the env runners' time: raise "
    "num_envs_per_env_runner, so that one pass serves more envs, make the network smaller (model_config), or raise "
    "num_env_runners.",
    "connectors": "Connector pieces take {env_runners[connectors]:.0%} of the env runners' time: "
    "reporting(connector_timers=True) times each of them; raise num_envs_per_env_runner if they work on whole "
    "batches, or num_env_runners.",
    "callbacks": "{env_runners[other]:.0%} of the env runners' time is spent outside of env, module and connectors: "
    "look at the callbacks of episodes and samples, and raise rollout_fragment_length if fragments are short.",
    "one slow runner": "Env runner {speed[slowest]} samples {speed[min]:.0f} env steps/s, the median is "
    "{speed[median]:.0f}: look at its machine and at what its env does (env_config.worker_index), or run without it "
    "(num_env_runners).",
    "transport": "Data is on its way for {update[transport]:.0%} of the time: store smaller observations (uint8 or "
    "float16, environment(wrappers=…)), run env runners and learners nearer to the broker, or let sampling continue "
    "during updates with staleness=1.",
    "reduce": "Learners wait {learners[reduce]:.0%} of their time for each other's gradients: raise minibatch_size, "
    "use fewer ranks (num_learners), or connect them faster.",
    "learner": "Learners train for {update[learners]:.0%} of the time: lower num_epochs, raise minibatch_size or "
    "num_learners, train on a GPU (num_gpus_per_learner=1), or let sampling continue during updates with staleness=1.",
    "learner connector": "The learner connector takes {learners[connector]:.0%} of the learners' time: look at its "
    "pieces (learner_connector; their timers are in the result), or raise num_learners.",
    "driver": "No update is open for {update[driver]:.0%} of the time: look at the driver's callbacks, set "
    "evaluation_parallel_to_training=True, or write fewer checkpoints (checkpoint_every_s).",
    "unknown": "Env runners take most of the time, but too few steps were timed to tell what of them.",
}


def judge(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what limited the iteration with this result.

    Args:
        result: A result of `train()`, or one read from a run directory's ``metrics.jsonl``.

    Returns:
        ``"stage"``: the one that takes the largest part of the time. ``"advice"``: one sentence on what to change.
        ``"shares"``: fractions of time, {} if nothing was measured. Of the time per update (``"update"``):
        ``env_runners`` (mean busy time of the runners), ``slow_runners`` (waiting for the slowest), ``transport``,
        ``learners``, ``driver``. Of a runner's time (``"env_runners"``): env, inference, connectors, other, encode,
        deliver, wait. Of a learner's (``"learners"``): connector, forward, backward, reduce, other, wait. Each role's
        stages add up to 1.
    """
    if "bottleneck" in result:
        known = result["bottleneck"]
        return {name: known[name] for name in ("stage", "advice", "shares")}
    runners, timers = result.get("env_runners", {}), result.get("timers", {})
    of_runners, of_learners = _runner_shares(runners), _learner_shares(timers)
    if not of_runners and not of_learners:
        return {"stage": "unknown", "advice": "Nothing was timed in this iteration.", "shares": {}}
    shares = {"update": _update_shares(runners, timers, of_runners, of_learners)}
    if of_runners:
        shares["env_runners"] = of_runners
    if of_learners:
        shares["learners"] = of_learners
    speed = runners.get("runner_speed", {})
    stage = _stage(shares, speed)
    is_connector = stage == "learner" and of_learners["connector"] > 0.5 * shares["update"]["learners"]
    advice = _ADVICE["learner connector" if is_connector else stage]
    return {"stage": stage, "advice": advice.format(speed=speed, **shares), "shares": shares}


def _runner_shares(runners: Mapping[str, Any]) -> dict[str, float]:
    sample_s, between_s = _get(runners, "sample"), _get(runners, "time_between_sampling")
    if not (sample_s > 0 and between_s >= 0):  # external runners may send any numbers
        return {}
    num_steps = _get(runners, NUM_VECTOR_STEPS_PER_SAMPLE)
    env_s = num_steps * _get(runners, ENV_STEP_TIMER)
    inference_s = num_steps * _get(runners, INFERENCE_TIMER)
    connectors_s = num_steps * (_get(runners, ENV_TO_MODULE_TIMER) + _get(runners, MODULE_TO_ENV_TIMER))
    timed_s = env_s + inference_s + connectors_s
    # Fused sampling times all steps together, and one in sixteen steps by stage.
    whole_s = min(_get(runners, VECTOR_STEPS_TIMER, timed_s), sample_s)
    scale = whole_s / max(timed_s, 1e-12)
    reset_s = min(_get(runners, ENV_RESET_TIMER), sample_s - timed_s * scale)
    encode_s = min(_get(runners, FRAGMENT_ENCODE_TIMER), between_s)
    delivery_s = _get(runners, FRAGMENT_DELIVERY_TIMER) + _get(runners, WEIGHTS_WAIT_TIMER)
    deliver_s = min(delivery_s, between_s - encode_s)
    stages = {
        "env": env_s * scale + reset_s,
        "inference": inference_s * scale,
        "connectors": connectors_s * scale,
        "other": sample_s - timed_s * scale - reset_s,
        "encode": encode_s,
        "deliver": deliver_s,
        "wait": between_s - encode_s - deliver_s,
    }
    for name, seconds in stages.items():
        stages[name] = max(seconds, 0.0) / (sample_s + between_s)
    return stages


def _learner_shares(timers: Mapping[str, Any]) -> dict[str, float]:
    busy_s = _get(timers, "learner_thread_update_timer")
    if not busy_s:
        return {}
    stages = {}
    for name in ("learner_connector_timer", *LEARNER_STAGES):
        stages[name.split("_")[1]] = _get(timers, name)
    stages["other"] = max(busy_s - sum(stages.values()), 0.0)
    stages["wait"] = _get(timers, "learner_thread_in_queue_wait_timer")
    whole_s = sum(stages.values())
    for name, seconds in stages.items():
        stages[name] = seconds / whole_s
    return stages


def _update_shares(
    runners: Mapping[str, Any],
    timers: Mapping[str, Any],
    env_runners: Mapping[str, float],
    learners: Mapping[str, float],
) -> dict[str, float]:
    """Return the parts of the time per update; the last two are the shares of these roles."""
    idle = env_runners.get("deliver", 0.0) + env_runners.get("wait", 0.0)
    busy = _get(runners, "runner_speed/busy_mean", 1.0 - idle if env_runners else 0.0)
    slowest = max(busy, _get(runners, "runner_speed/busy_max"))
    learns = 1.0 - learners["wait"] if learners else 0.0
    idle = max(0.0, 1.0 - slowest - learns)
    cycle_s = _get(timers, "learner_thread_update_timer") + _get(timers, "learner_thread_in_queue_wait_timer")
    open_s = _get(timers, "env_runner_sampling_timer") + _get(timers, "learner_update_timer")
    # The time in which no update was open, or training did not progress.
    closed = max(0.0, 1.0 - open_s / cycle_s) if cycle_s and open_s else 0.0
    driver, has_broker = min(idle, closed), "update" in timers
    return {
        "env_runners": busy,
        "slow_runners": slowest - busy,
        # Asynchronous runs may be limited by delivery although all parts overlap.
        "transport": max(idle - driver, env_runners.get("deliver", 0.0)) if has_broker else 0.0,
        "learners": learns,
        "driver": driver if has_broker else idle,
    }


def _stage(shares: Mapping[str, Mapping[str, float]], speed: Mapping[str, Any]) -> Bottleneck:
    update, stages = shares["update"], shares.get("env_runners", {})
    parts: dict[Bottleneck, float] = {
        "env": update["env_runners"] + update["slow_runners"],
        "transport": update["transport"],
        "learner": update["learners"],
        "driver": update["driver"],
    }
    largest = max(parts, key=parts.__getitem__)
    if largest == "learner":
        return "reduce" if shares["learners"]["reduce"] > 0.5 * update["learners"] else "learner"
    if largest != "env":
        return largest
    if speed and speed["min"] < _SLOW * speed["median"]:
        lost = 1.0 - speed["mean"] / speed["median"]  # of what all could sample at the median speed
        if lost > _LOST or update["slow_runners"] > update["env_runners"]:
            return "one slow runner"
    of_runner: dict[Bottleneck, float] = {
        "env": stages.get("env", 0.0),
        "inference": stages.get("inference", 0.0),
        "connectors": stages.get("connectors", 0.0),
    }
    if not any(of_runner.values()):
        return "unknown"  # no vector step was timed by stage
    of_runner["callbacks"] = stages["other"]
    return max(of_runner, key=of_runner.__getitem__)
