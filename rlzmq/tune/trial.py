"""Trial: one trial's state in the driver, and the files in its directory."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import shutil
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlzmq.config.base_config import BaseConfig
from rlzmq.config.plain import to_json
from rlzmq.core.checkpoint import remove_tree
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import make_directories, opener, write_text
from rlzmq.telemetry.runs import Mode, check_mode, flatten, results_in, score_at
from rlzmq.tune.search import TrialConfig
from rlzmq.tune.study import Claim
from rlzmq.tune.trial_process import STAGED_CHECKPOINT

__all__ = ["CheckpointConfig", "SavedCheckpoint", "Trial", "TrialStatus", "read_checkpoints", "read_results"]

TrialStatus = Literal["PENDING", "RUNNING", "PAUSED", "TERMINATED", "ERROR"]


@dataclass
class CheckpointConfig:
    """When trials save checkpoints, and which checkpoints are kept.

    Attributes:
        num_to_keep: Number of checkpoints to keep; None: all.
        checkpoint_score_attribute: Path of the metric that ranks the checkpoints; None: the newest ones are kept.
        checkpoint_score_order: Whether a good score is large ("max") or small ("min").
        checkpoint_frequency: Iterations between two checkpoints; 0: none before the end. Functions save with
            ``tune.report(…, checkpoint=…)`` instead.
        checkpoint_at_end: Whether a trial saves a checkpoint when it ends; None: yes, unless it is a function.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: Mode = "max"
    checkpoint_frequency: int = 0
    checkpoint_at_end: bool | None = None

    def __post_init__(self) -> None:
        check_mode(self.checkpoint_score_order, "CheckpointConfig")
        if self.num_to_keep is not None and self.num_to_keep < 1:
            raise ConfigurationError(
                f"CheckpointConfig(num_to_keep={self.num_to_keep!r}): expected at least 1, or None."
            )
        if self.checkpoint_frequency < 0:
            raise ConfigurationError(
                f"CheckpointConfig(checkpoint_frequency={self.checkpoint_frequency!r}): expected at least 0."
            )


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint of a trial.

    Attributes:
        name: Name of its directory, within the trial's directory.
        result: The trial's last result before the checkpoint.
        is_kept: Whether the user asked for it; the others serve only for pauses and exploitation.
        changes: Config values by path that differ from the trial's first config.
    """

    name: str
    result: dict[str, Any]
    is_kept: bool = True
    changes: dict[str, Any] = field(default_factory=dict)


class Trial:
    """One trial, as its driver, schedulers, callbacks and the functions that name trials see it. Its text is its name.

    Files: ``params.json`` and, of an algorithm, ``config.toml`` (its config), ``result.json`` (a line per result),
    ``progress.csv`` (a row per result, with the first one's slash paths as columns), ``checkpoint_NNNNNN/``,
    ``checkpoints.json`` (the checkpoints with their results), ``error.txt``.

    Attributes:
        trial_id, name, trainable_name: Its id, its name and that of the trainable.
        path: Its directory; missing while the trial is being named.
        first_config: Its first config.
        config: Its current config.
        changes: Config values by path that differ from its first config.
        status: Its status.
        last_result: Its newest result; {} before the first.
        checkpoints: Its checkpoints, oldest first.
        error: What ended it; None if nothing did.
        num_failures: How often its code raised an error.
        num_kills: How often its process was killed.
    """

    path: Path
    config: TrialConfig

    def __init__(self, claim: Claim, trainable_name: str) -> None:
        self.claim = claim
        self.trial_id: str = f"{claim.index:05d}"
        self.trainable_name = trainable_name
        self.name: str = f"{trainable_name}_{self.trial_id}"
        self.first_config: TrialConfig = {}
        self.config = self.first_config
        self.changes: dict[str, Any] = {}
        self.status: TrialStatus = "PENDING"
        self.error: BaseException | None = None
        self.num_failures = self.num_kills = 0
        self.checkpoints: list[SavedCheckpoint] = []
        self.last_result: dict[str, Any] = {}
        self.pid = 0
        self._columns: list[str] = []

    def open(self, path: Path) -> None:
        """Use this directory; existing files come from an earlier driver."""
        self.path = path
        make_directories(path)
        self.checkpoints = read_checkpoints(path)
        results = read_results(path)
        self.last_result = results[-1] if results else {}

    @property
    def evaluated_params(self) -> dict[str, Any]:
        """Its searched values by path, except those of functions."""
        return self.claim.parameters

    def __str__(self) -> str:
        return self.name

    @property
    def is_waiting(self) -> bool:
        """Whether the trial waits for a free slot."""
        return self.status in ("PENDING", "PAUSED")

    @property
    def is_finished(self) -> bool:
        """Whether the trial has ended."""
        return self.status in ("TERMINATED", "ERROR")

    # -- results --------------------------------------------------------------------------------------------

    def write_config(self) -> None:
        """Write ``params.json``, and ``config.toml`` for ``rlzmq train --config``."""
        config = self.config.serialize() if isinstance(self.config, BaseConfig) else to_json(self.config)
        write_text(self.path / "params.json", json.dumps(config, indent=1))
        if isinstance(self.config, BaseConfig):
            with contextlib.suppress(ConfigurationError):  # the config holds code
                write_text(self.path / "config.toml", self.config.to_toml())

    def log(self, result: dict[str, Any]) -> None:
        """Append a result to ``result.json`` and ``progress.csv``."""
        self.last_result = result
        for name, text in (
            ("result.json", json.dumps(result) + "\n"),
            ("progress.csv", self._rows([result])),
        ):
            with open(self.path / name, "ab", buffering=0, opener=opener) as file:
                file.write(text.encode())

    def rewind(self) -> SavedCheckpoint | None:
        """Return the newest checkpoint to continue from. Drop its error and later results, which are computed again."""
        newest = self.checkpoints[-1] if self.checkpoints else None
        iteration = 0 if newest is None else newest.result["training_iteration"]
        kept = [result for result in read_results(self.path) if result["training_iteration"] <= iteration]
        write_text(self.path / "result.json", "".join(json.dumps(result) + "\n" for result in kept))
        (self.path / "error.txt").unlink(missing_ok=True)
        self._columns = []
        write_text(self.path / "progress.csv", self._rows(kept))
        self.last_result = kept[-1] if kept else {}
        return newest

    def _rows(self, results: Sequence[Mapping[str, Any]]) -> str:
        """Return results as rows of ``progress.csv``, with the header in front of the first one."""
        rows = [flatten(result) for result in results]
        text = io.StringIO()
        if rows and not self._columns:
            self._columns = list(rows[0])
            csv.writer(text, lineterminator="\n").writerow(self._columns)
        csv.DictWriter(text, self._columns, extrasaction="ignore", lineterminator="\n").writerows(rows)
        return text.getvalue()

    def write_error(self, error: BaseException) -> None:
        """Write ``error.txt``."""
        self.error = error
        write_text(self.path / "error.txt", "".join(traceback.format_exception(error)))

    # -- checkpoints ----------------------------------------------------------------------------------------

    def new_checkpoint_path(self) -> Path:
        """Return the path for the next checkpoint."""
        number = int(self.checkpoints[-1].name.partition("_")[2]) + 1 if self.checkpoints else 0
        return self.path / f"checkpoint_{number:06d}"

    def add_checkpoint(self, path: Path, *, is_kept: bool, config: CheckpointConfig) -> None:
        """Register a written checkpoint, and remove checkpoints that should not be kept."""
        self.checkpoints.append(SavedCheckpoint(path.name, self.last_result, is_kept, self.changes))
        self._remove_old(config)

    def adopt_staged(self, config: CheckpointConfig) -> None:
        """Give the checkpoint that the trial's function reported its final name."""
        path = self.new_checkpoint_path()
        remove_tree(path)
        (self.path / STAGED_CHECKPOINT).rename(path)
        self.add_checkpoint(path, is_kept=True, config=config)

    def copy_checkpoint(
        self, source: Trial, changes: Mapping[str, Any], config: CheckpointConfig
    ) -> dict[str, Any] | None:
        """Copy another trial's newest checkpoint, to continue from it with a changed config.

        Returns:
            The source's last result before the checkpoint; None if the source has no checkpoint.
        """
        if not source.checkpoints:
            return None
        saved = source.checkpoints[-1]
        path = self.new_checkpoint_path()
        unfinished = path.with_name(f".{path.name}.unfinished")
        remove_tree(unfinished)
        remove_tree(path)
        shutil.copytree(source.path / saved.name, unfinished)
        unfinished.rename(path)
        self.changes = {**saved.changes, **changes}
        self.checkpoints.append(SavedCheckpoint(path.name, saved.result, False, self.changes))
        self._remove_old(config)
        return saved.result

    def _remove_old(self, config: CheckpointConfig) -> None:
        """Remove all but the best or newest checkpoints; always keep the newest one, which a restart needs."""
        kept = [saved for saved in self.checkpoints if saved.is_kept]
        attribute, order = config.checkpoint_score_attribute, config.checkpoint_score_order
        if config.num_to_keep is not None and attribute is not None:
            kept.sort(key=lambda saved: score_at(saved.result, attribute, order))
        if config.num_to_keep is not None:
            kept = kept[-config.num_to_keep :]
        names = {saved.name for saved in kept} | {self.checkpoints[-1].name}
        removed = [saved for saved in self.checkpoints if saved.name not in names]
        self.checkpoints = [saved for saved in self.checkpoints if saved.name in names]
        write_text(
            self.path / "checkpoints.json",
            json.dumps([asdict(saved) for saved in self.checkpoints], default=repr),
        )
        for saved in removed:
            remove_tree(self.path / saved.name)


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the results in a trial's directory."""
    return results_in(path / "result.json")


def read_checkpoints(path: Path) -> list[SavedCheckpoint]:
    """Return the checkpoints in a trial's directory, oldest first."""
    file = path / "checkpoints.json"
    if not file.exists():
        return []
    listed = [SavedCheckpoint(**saved) for saved in json.loads(file.read_text(encoding="utf-8"))]
    return [saved for saved in listed if (path / saved.name).is_dir()]
