"""Study: the shared record of a search in Optuna's storage, and the exactly-once claim of its trials.

A trial has an index, which is its identity. For each index the storage has one waiting entry; a driver claims it
atomically (`claim`) and ends it (`end`). If a driver dies, another driver fails its entries and adds new ones for the
same indices. If two drivers do so at once, the entry with the lowest number counts. The others are dropped when they
are claimed, so each index ends exactly once.

A driver on the same machine is alive while its process is; a driver on another machine, while the counter in its
heartbeat changes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlzmq.config.search_space import Function, SearchObject
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.process import process_space, start_mark
from rlzmq.telemetry.runs import Mode
from rlzmq.tune.search import Searcher, draw, load_optuna, random_trial, suggest

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial
    from optuna.trial import Trial as OptunaTrial

__all__ = ["Claim", "EndedTrial", "Status", "Study"]

Status = Literal["TERMINATED", "ERROR"]

_GRACE_S = 60.0  # for which a heartbeat from another machine may stay the same
_NUM_ATTEMPTS = 4  # to create the tables
_INDEX, _OWNER, _ENDED, _NAMES = "index", "owner", "ended", "names"


@dataclass(frozen=True)
class Claim:
    """A trial that this driver has claimed and runs.

    Attributes:
        index: The trial's index.
        number: Number of its entry in the study.
        parameters: Its values by path, except those of functions.
        names: The stored names of the trial and of its directory; () if it has the default ones.
    """

    index: int
    number: int
    parameters: dict[str, Any]
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class EndedTrial:
    """An ended trial, as recorded in the study.

    Attributes:
        index: The trial's index.
        status: How it ended.
        path: Its directory, on the machine that ran it.
        result: Its last result.
        error: Text of its error; "" if it has none.
    """

    index: int
    status: Status
    path: str
    result: dict[str, Any]
    error: str


class Study:
    """A search's entries in Optuna's storage. Use it from one thread only.

    Args:
        storage: The storage's URL.
        name: The experiment's name.
        mode: Whether the metric should be large ("max") or small ("min").
        searcher: Chooses the values.
        space: The search objects by path.
        pruner: Optuna's pruner, which tells which trials end early; None: none does.

    Raises:
        ConfigurationError: Optuna is not installed, or the storage cannot be used.

    Attributes:
        seed: Seed of the search; the same for all drivers.
    """

    def __init__(
        self,
        storage: str,
        name: str,
        mode: Mode | None,
        searcher: Searcher,
        space: Mapping[str, SearchObject],
        pruner: object = None,
    ) -> None:
        self._optuna = load_optuna()
        self._searcher = searcher
        self._space = dict(space)
        self._token = secrets.token_hex(8)
        self._host = process_space()
        self._beats = 0
        self._seen: dict[str, tuple[int, float]] = {}  # other drivers: counter, and when it last changed
        self._owned: dict[int, Any] = {}  # Optuna's trials by number
        self._reported: dict[int, set[int]] = {}  # times with a recorded metric, by number
        self._study = self._opened(storage, name, "maximize" if mode == "max" else "minimize")
        if "seed" not in self._study.user_attrs:
            self._study.set_user_attr(
                "seed", secrets.randbits(31) if searcher.seed is None else searcher.seed
            )
        self.seed: int = int(self._study.user_attrs["seed"])
        sampler = searcher.make_sampler(self.seed)
        if sampler is not None:
            self._study.sampler = sampler
        self._study.pruner = pruner or self._optuna.pruners.NopPruner()
        self.beat()

    @property
    def num_entries(self) -> int:
        """Number of indices that have an entry."""
        return len({trial.user_attrs[_INDEX] for trial in self._entries()})

    def num_live(self) -> int:
        """Return how many entries are waiting or running."""
        return sum(not trial.state.is_finished() for trial in self._entries())

    def check_space(self) -> None:
        """Check that values are drawn from what the stored trials drew them from. Ranges may have other bounds.

        Raises:
            ConfigurationError: Choices differ, or the kind of a search object.
        """
        check, now = self._optuna.distributions.check_distribution_compatibility, random_trial(0)
        stored = {path: kind for trial in self._entries() for path, kind in trial.distributions.items()}
        for path, item in self._space.items():
            if path in stored and not isinstance(item, Function):
                suggest(now, path, item)
                try:
                    check(stored[path], now.distributions[path])
                except ValueError:
                    raise ConfigurationError(
                        f"{path}={item!r}: the trials of this experiment drew it from {stored[path]}. Continue with "
                        "the same choices, or give the search another name."
                    ) from None

    # -- trials --------------------------------------------------------------------------------------------

    def ensure_waiting(self, num_trials: int) -> None:
        """Add an entry for each index below `num_trials` that has none."""
        present = {trial.user_attrs[_INDEX] for trial in self._entries() if not self._is_lost(trial)}
        for index in range(num_trials):
            if index not in present:
                self._add(index)

    def claim(self) -> Claim | None:
        """Claim a waiting trial and choose its values; return None if no trial is waiting."""
        while self._study.get_trials(deepcopy=False, states=(self._optuna.trial.TrialState.WAITING,)):
            trial = self._study.ask()
            try:
                trial.set_user_attr(_OWNER, self._token)
            except self._optuna.exceptions.UpdateFinishedTrialError:
                continue  # another driver took it for lost because it had no owner yet
            index = trial.user_attrs.get(_INDEX)
            if index is None or self._is_duplicate(index, trial.number):
                self._tell(trial.number, self._optuna.trial.TrialState.FAIL)
                continue
            self._owned[trial.number] = trial
            names = tuple(trial.user_attrs.get(_NAMES, ()))
            return Claim(index, trial.number, self._suggested(trial), names)
        return None

    def store_names(self, claim: Claim, names: tuple[str, str]) -> None:
        """Record the names of a trial and its directory, for drivers that continue it."""
        # Taken over: see `end`.
        with contextlib.suppress(self._optuna.exceptions.UpdateFinishedTrialError):
            self._owned[claim.number].set_user_attr(_NAMES, names)

    def report(self, claim: Claim, time: int, value: float) -> bool:
        """Record a metric of a running trial; return whether the pruner would end it.

        Args:
            claim: The trial.
            time: The result's time, rounded; a second value for the same time is ignored.
            value: The metric.
        """
        trial = self._owned[claim.number]
        if time in self._reported.setdefault(claim.number, set()):
            return False
        self._reported[claim.number].add(time)
        # Taken over: see `end`.
        with contextlib.suppress(self._optuna.exceptions.UpdateFinishedTrialError):
            trial.report(value, time)
            return bool(trial.should_prune())
        return False

    def end(
        self,
        claim: Claim,
        status: Status,
        path: Path,
        result: Mapping[str, Any],
        value: float | None,
        error: str,
    ) -> bool:
        """End a trial; return False if another driver has taken it over."""
        states = self._optuna.trial.TrialState
        trial = self._owned.pop(claim.number)
        ended = {"status": status, "path": str(path), "result": json.dumps(result), "error": error}
        try:
            trial.set_user_attr(_ENDED, ended)
        except self._optuna.exceptions.UpdateFinishedTrialError:
            return False
        if status == "ERROR":
            return self._tell(claim.number, states.FAIL)
        if value is None:
            return self._tell(claim.number, states.PRUNED)
        return self._tell(claim.number, states.COMPLETE, value)

    def ended(self) -> list[EndedTrial]:
        """Return the trials that have ended, by index."""
        found = {}
        for trial in self._entries():
            if trial.state.is_finished() and _ENDED in trial.user_attrs:
                facts = trial.user_attrs[_ENDED]
                index = trial.user_attrs[_INDEX]
                result = json.loads(facts["result"])
                found[index] = EndedTrial(index, facts["status"], facts["path"], result, facts["error"])
        return [found[index] for index in sorted(found)]

    def forget(self, index: int) -> None:
        """Add a new entry for an ended trial, so that it runs again."""
        for trial in self._entries():
            if trial.user_attrs[_INDEX] == index and _ENDED in trial.user_attrs:
                self._study.add_trial(self._waiting_copy(trial, again=trial.user_attrs.get("again", 0) + 1))
                return

    # -- drivers -------------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Record that this driver is alive."""
        self._beats += 1
        facts = {
            "host": self._host,
            "pid": os.getpid(),
            "started": start_mark(os.getpid()),
            "beats": self._beats,
        }
        self._study.set_user_attr(f"driver:{self._token}", facts)

    def close(self) -> None:
        """Record that this driver no longer runs any trial."""
        self._study.set_user_attr(f"driver:{self._token}", {"closed": True})

    def take_over_lost(self) -> int:
        """Fail the trials of dead drivers and add waiting entries in their place; return the number of these trials."""
        states = self._optuna.trial.TrialState
        entries = self._entries()
        # Read after the entries, since a driver registers before it claims an entry.
        drivers = self._study.user_attrs
        num_taken = 0
        for trial in entries:
            if trial.state != states.RUNNING or trial.number in self._owned:
                continue
            if self._is_alive(trial.user_attrs.get(_OWNER), drivers):
                continue
            if self._tell(trial.number, states.FAIL):
                self._study.add_trial(self._waiting_copy(trial, again=trial.user_attrs.get("again", 0)))
                num_taken += 1
        return num_taken

    # -- parts -----------------------------------------------------------------------------------------------

    def _opened(self, storage: str, name: str, direction: str) -> Any:
        """Return the study, created if it is missing. Other drivers may create it at the same time."""
        for attempt in itertools.count(1):
            try:
                return self._optuna.create_study(
                    storage=storage, study_name=name, direction=direction, load_if_exists=True
                )
            except Exception as error:  # raised by SQLAlchemy, a database driver, or Optuna
                if attempt == _NUM_ATTEMPTS:
                    raise ConfigurationError(
                        f"The storage {_without_password(storage)} cannot be used: {error}"
                    ) from error
                time.sleep(secrets.randbelow(100) / 1000)

    def _entries(self) -> list[Any]:
        return [trial for trial in self._study.get_trials(deepcopy=False) if _INDEX in trial.user_attrs]

    def _add(self, index: int) -> None:
        self._study.enqueue_trial(
            self._searcher.fixed(self._space, index, self.seed), user_attrs={_INDEX: index}
        )

    def _waiting_copy(self, trial: FrozenTrial, again: int) -> Any:
        """Return a waiting entry with the parameters of an earlier one, run again so many times after it ended."""
        fixed = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
        return self._optuna.create_trial(
            state=self._optuna.trial.TrialState.WAITING,
            system_attrs={"fixed_params": fixed},
            user_attrs={name: trial.user_attrs[name] for name in (_INDEX, _NAMES) if name in trial.user_attrs}
            | {"again": again},
        )

    def _is_lost(self, trial: FrozenTrial) -> bool:
        return trial.state == self._optuna.trial.TrialState.FAIL and _ENDED not in trial.user_attrs

    def _is_duplicate(self, index: int, number: int) -> bool:
        """Return whether an earlier entry of this index counts instead."""
        entries = {trial.number: trial for trial in self._entries()}
        again = entries[number].user_attrs.get("again", 0)
        return any(
            trial.user_attrs[_INDEX] == index
            and trial.number < number
            and trial.user_attrs.get("again", 0) >= again
            and not self._is_lost(trial)
            for trial in entries.values()
        )

    def _tell(self, number: int, state: object, value: float | None = None) -> bool:
        try:
            self._study.tell(number, value, state=state)
        except (ValueError, self._optuna.exceptions.UpdateFinishedTrialError):
            return False  # it has ended already, or another driver ends it right now
        return True

    def _suggested(self, trial: OptunaTrial) -> dict[str, Any]:
        drawn = {path: item for path, item in self._space.items() if not isinstance(item, Function)}
        return {path: draw(path, item, functools.partial(suggest, trial)) for path, item in drawn.items()}

    def _is_alive(self, token: str | None, drivers: Mapping[str, Any]) -> bool:
        if token is None:  # the driver died, or has not written its name yet
            others = [name.partition(":")[2] for name in drivers if name.startswith("driver:")]
            return any(self._is_alive(other, drivers) for other in others if other != self._token)
        facts = drivers.get(f"driver:{token}")
        if facts is None or facts.get("closed"):
            return False
        if facts["host"] == self._host and facts["started"] is not None:
            return bool(start_mark(facts["pid"]) == facts["started"])
        now = time.monotonic()
        beats, since = self._seen.get(token, (-1, now))
        if facts["beats"] != beats:
            since = now
        self._seen[token] = (facts["beats"], since)
        return now - since < _GRACE_S


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
