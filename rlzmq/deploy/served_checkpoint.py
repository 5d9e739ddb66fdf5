"""The policies of the served checkpoint, and the search for newer checkpoints of the same run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from rlzmq.algorithms.policy import Policy
from rlzmq.core.checkpoint import read_manifest
from rlzmq.core.checkpoint_series import checkpoints_at
from rlzmq.core.errors import CheckpointError, ConfigurationError
from rlzmq.core.printable import printable
from rlzmq.core.synonyms import did_you_mean
from rlzmq.deploy.served_policy import RequestError, ServedPolicy

__all__ = ["CheckpointSource", "LoadPolicies", "ServedCheckpoint"]

_log = logging.getLogger("rlzmq.serve")

_MAX_TRIES = 5

LoadPolicies = Callable[[Path], Sequence[Policy]]
"""Loads the policies of a checkpoint: one, or one for each agent."""


class ServedCheckpoint:
    """The policies of one checkpoint.

    Attributes:
        name: The checkpoint's name, e.g. "000120".
        policies: The served policies.

    Raises:
        ConfigurationError: There is no policy, or a connector piece cannot be served.
    """

    def __init__(self, path: Path, policies: Sequence[Policy]) -> None:
        self.path = path
        self.name: str = path.name
        self.policies: list[ServedPolicy] = [ServedPolicy(policy) for policy in policies]
        if not self.policies:
            raise ConfigurationError(
                f"{path}: which module an agent uses depends on the episode: choose one with module_id and agent_id "
                "(--module, --agent)."
            )

    def choose(self, module_id: str = "", agent_id: str = "") -> ServedPolicy:
        """Return the policy of a module or agent; "" stands for any, if there is only one.

        Raises:
            KeyError: There is no such policy.
            RequestError: There are several, and none was chosen.
        """
        if not module_id and not agent_id:
            if len(self.policies) > 1:
                modules = sorted({policy.module_id for policy in self.policies})
                agents = [policy.agent_id for policy in self.policies]
                raise RequestError(
                    f"choose one of the modules {modules} with module, or of the agents {agents} with agent"
                )
            return self.policies[0]
        for policy in self.policies:
            if module_id in ("", policy.module_id) and agent_id in ("", policy.agent_id):
                return policy
        modules = sorted({policy.module_id for policy in self.policies})
        if module_id not in ("", *modules):
            raise KeyError(f"no module {module_id[:100]!r}.{did_you_mean(module_id, modules)}")
        agents = [policy.agent_id for policy in self.policies]
        if agent_id not in ("", *agents):
            raise KeyError(f"no agent {agent_id[:100]!r}.{did_you_mean(agent_id, agents)}")
        raise KeyError(f"agent {agent_id[:100]!r} does not use module {module_id[:100]!r}")

    def check_replaces(self, old: ServedCheckpoint) -> None:
        """Check that this checkpoint can answer every request that another one answers.

        Raises:
            CheckpointError: It lacks a policy, or its observations, actions or state differ.
        """
        ours = {(policy.module_id, policy.agent_id): policy for policy in self.policies}
        for policy in old.policies:
            new = ours.get((policy.module_id, policy.agent_id))
            what = f"module {policy.module_id!r}" + (
                f" (agent {policy.agent_id!r})" if policy.agent_id else ""
            )
            if new is None:
                raise CheckpointError(f"it has no {what}")
            same_spaces = (
                new.observation_space == policy.observation_space and new.action_space == policy.action_space
            )
            if not same_spaces or new.ports != policy.ports:
                raise CheckpointError(f"{what} has other spaces or another state than the served one")


class CheckpointSource:
    """Finds and loads the newest checkpoint of a path. Its methods block; call one at a time.

    Args:
        path: A checkpoint, or a directory of a run or of checkpoints.
        load: See `LoadPolicies`.
        on_skipped: Called, on the thread of `newer_than`, for each checkpoint that cannot be served.
    """

    def __init__(
        self, path: str | Path, load: LoadPolicies, *, on_skipped: Callable[[], None] = lambda: None
    ) -> None:
        self._path = path
        self._load = load
        self._on_skipped = on_skipped
        self._current: tuple[str, str] | None = None
        self._failures: Counter[tuple[str, str]] = Counter()

    def retry(self) -> None:
        """Let `newer_than` retry all skipped checkpoints."""
        self._failures.clear()

    def newer_than(self, served: ServedCheckpoint | None) -> ServedCheckpoint | None:
        """Return the newest complete checkpoint, or None if it was the last one returned.

        A checkpoint that cannot be served is skipped with a warning. It is retried a few times, since it may be an
        incomplete copy.

        Args:
            served: The checkpoint to replace; None for the first one, whose errors are raised.

        Raises:
            CheckpointError, ConfigurationError: `served` is None, and no checkpoint can be served.
        """
        first_error: Exception | None = None
        for candidate in checkpoints_at(self._path):
            identity = _identity(candidate)
            if identity == self._current:
                return None
            if self._failures.get(identity, 0) >= _MAX_TRIES:
                continue
            try:
                found = ServedCheckpoint(candidate, self._load(candidate))
                if served is not None:
                    found.check_replaces(served)
            except Exception as error:  # whatever the error, the current checkpoint stays in use
                first_error = first_error or error
                if identity not in self._failures:
                    _log.warning("skipped the checkpoint %s: %s", candidate, printable(str(error)))
                    self._on_skipped()
                self._failures[identity] += 1
                continue
            self._current = identity
            return found
        if served is not None:
            return None
        if first_error is not None:
            raise first_error
        raise CheckpointError(f"{self._path} holds no checkpoint.")


def _identity(path: Path) -> tuple[str, str]:
    """Return a value that changes when another checkpoint is written to the same path."""
    try:
        return str(path), str(read_manifest(path)["sha256"])
    except CheckpointError as error:
        return str(path), str(error)
