"""synchronous_parallel_sample: rounds of samples from all runners until there are enough steps."""

from __future__ import annotations

from typing import Any

__all__ = ["synchronous_parallel_sample"]


def synchronous_parallel_sample(
    *,
    worker_set: Any,
    max_agent_steps: int | None = None,
    max_env_steps: int | None = None,
    concat: bool = True,
    sample_timeout_s: float | None = None,
    random_actions: bool = False,
    _uses_new_env_runners: bool = True,
    _return_metrics: bool = False,
) -> Any:
    """Have every runner sample fragments, in rounds, until there are enough steps (RLlib's function).

    A round waits for its slowest runner; ``env_runner_group.sample(num_timesteps=…)`` divides the steps instead.

    Args:
        worker_set: An EnvRunnerGroup.
        max_agent_steps: Stop at this number of agent steps.
        max_env_steps: Stop at this number of env steps. With neither limit, make one round.
        concat: Return one flat list of episodes; False: a list per sample.
        sample_timeout_s: Runners whose samples take longer are left out of a round; None: no limit.
        random_actions: Sample without the module.
        _uses_new_env_runners: Must be True.
        _return_metrics: Also return the results of the runners' `get_metrics`, for
            ``metrics.aggregate(…, key="env_runners")``.

    Returns:
        The episodes, or (episodes, metrics).

    Raises:
        ValueError: Both limits are given.
    """
    if max_agent_steps is not None and max_env_steps is not None:
        raise ValueError("synchronous_parallel_sample: give max_agent_steps or max_env_steps, not both.")
    options = {"random_actions": True} if random_actions else {}

    def sample(env_runner: Any) -> Any:
        episodes = env_runner.sample(**options)
        return episodes, env_runner.get_metrics() if _return_metrics else None

    samples: list[Any] = []
    metrics: list[Any] = []
    num_steps = 0
    while True:
        answers = worker_set.foreach_env_runner(sample, timeout_seconds=sample_timeout_s)
        for episodes, of_runner in answers:
            samples.append(episodes)
            metrics.append(of_runner)
            num_steps += sum(
                episode.env_steps() if max_agent_steps is None else episode.agent_steps()
                for episode in episodes
            )
        if not answers or num_steps >= (max_env_steps or max_agent_steps or 0):
            break
    result: list[Any] = [episode for of_runner in samples for episode in of_runner] if concat else samples
    return (result, metrics) if _return_metrics else result
