"""The nouns of rlzmq on one page, and the loop that they form.

What the package does, without its processes, failures and statistics::

    envs: Env                  # N environments, stepped together
    module: Module             # the policy and what its training needs
    to_module, to_env: Pipeline
    sampler: Sampler           # steps the envs with the module through both pipelines
    runner: EnvRunner          # owns the four above
    learner: Learner           # loss, gradients, optimizers, behind a pipeline of its own

    def training_step(request):                        # what one update of PPO is
        batch, finished, _ = sampler.run(request)      # sample: rows are written into the columns of a Batch
        learner.update(episodes=batch)                 # update: columns → advantages → minibatches → loss → step
        runner.copy_weights(learner.module, …)         # publish: the next fragment is sampled with these weights

In a sampler, a vector step is::

    columns = to_module(rl_module=module, episodes=ongoing)         # observations as the module takes them
    outputs = module.forward_exploration(columns)
    actions = to_env(rl_module=module, batch=outputs, episodes=ongoing)
    observations, rewards, terminated, truncated, infos = envs.step(actions)

In a learner, an update is::

    columns = learner_connector(rl_module=module, episodes=batch)   # GAE and V-trace are pieces of it
    for minibatch in epochs_of(columns):
        loss = compute_losses(fwd_out=module.forward_train(minibatch), batch=minibatch)
        apply_gradients(compute_gradients(loss))                    # averaged over the ranks

`UpdatePipeline` runs training steps: `SerialPipeline` on the caller's stack, `BrokerPipeline` with runners and learners
in processes of their own. Both train on the same numbers. `Algorithm.train` runs them until an iteration is complete.

Nothing here is inherited from: ``tests/typecheck/implementations.py`` says who implements what, and mypy checks it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rlzmq.driver.updates import Accounting, Sampled, UpdateResult
    from rlzmq.runners.env_runner import SampleRequest

__all__ = ["Batch", "Env", "Learner", "Module", "Pipeline", "Sampler", "UpdatePipeline"]


class Env(Protocol):
    """N environments that are stepped together.

    An environment whose episode has ended is reset by the next `step`, which ignores its action (NEXT_STEP).
    """

    num_envs: int

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Begin an episode in each; return observations and infos."""

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Step each; return observations, rewards, terminated, truncated and infos."""

    def close(self) -> None:
        """Close them all."""


class Batch(Protocol):
    """What was sampled: columns of rows, and a table of the episode chunks in them. Iteration gives episodes."""

    @property
    def num_env_steps(self) -> int:
        """Number of steps of environments in it."""

    def __len__(self) -> int:
        """Return the number of chunks."""


class Module(Protocol):
    """A neural network. Columns are trees of tensors ``[B, ...]``, of a stateful one ``[B, T, ...]``."""

    def forward_inference(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        """Compute what greedy acting needs, e.g. ``action_dist_inputs``."""

    def forward_exploration(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        """Compute what acting in training needs."""

    def forward_train(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        """Compute what the loss needs, with gradients."""

    def get_initial_state(self) -> Any:
        """Return the recurrent state of a new episode, {} if there is none."""


class Pipeline(Protocol):
    """Connector pieces in order: from episodes to a module, from a module to environments, from episodes to a loss."""

    def __call__(
        self,
        *,
        rl_module: Any,
        batch: dict[str, Any],
        episodes: Sequence[Any],
        explore: bool | None = None,
        shared_data: dict[str, Any] | None = None,
        metrics: Any = None,
    ) -> dict[str, Any]:
        """Change or extend the batch, or the episodes, and return the batch."""


class Sampler(Protocol):
    """The loop of a runner, over whole columns or over episodes. Both forms give identical numbers."""

    has_episodes: bool

    def reset(self) -> None:
        """Reset all environments and begin an episode in each."""

    def run(self, request: SampleRequest) -> tuple[Any, Any, int]:
        """Sample what is asked for; return a Batch, statistics of the ended episodes, and the vector steps made."""


class Learner(Protocol):
    """Trains a module. With several ranks, each trains its shard of a batch, and gradients are averaged."""

    weights_seq_no: int
    """The version of its weights: the number of updates that trained something."""

    def update(self, *, episodes: Any = None, timesteps: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Train on a Batch once per epoch, in minibatches; return metrics by module."""

    def get_state(self) -> dict[str, Any]:
        """Return weights, optimizers, counters and random streams: what makes a continued run exact."""

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from this state."""


class UpdatePipeline(Protocol):
    """Runs one update after the other: sample, update, publish."""

    accounting: Accounting
    """Each env step is trained, dropped for a counted reason, or pending."""

    bottleneck: str
    """What limits the run's speed, for observers."""

    async def sample(self) -> Sampled:
        """Sample a batch; or let runners sample, whose batch goes to the learners directly."""

    async def update(self, sampled: Sampled) -> UpdateResult:
        """Train on the batch; return once its update is committed."""

    async def publish(self, update: UpdateResult) -> None:
        """Give the runners the new weights, and what connectors have learned from the batch."""

    def take_learner_results(self) -> list[list[dict[str, Any]]]:
        """Return the learners' results since the last call, by update and rank; a rank that died has lost its own."""

    async def drain(self, *, gives_up: bool = False) -> list[UpdateResult]:
        """Wait until no update is open, or give them up, since the run ends; return those that ran ahead, published."""

    async def restart(self) -> None:
        """Go on from the learners' state, which was replaced."""

    def fault_tolerance(self) -> dict[str, int]:
        """Return how many processes were lost and replaced, by kind."""

    async def stop(self) -> None:
        """End, and account for what was sampled and never trained."""
