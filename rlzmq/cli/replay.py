"""``rlzmq replay``: repeat a recorded run's learner update by update, or train one quarantined fragment."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import optree
import tyro

from rlzmq.cli.parsing import command, import_first
from rlzmq.core.errors import ConfigurationError, ProtocolError, printable
from rlzmq.core.synonyms import did_you_mean
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.telemetry.runs import Run
from rlzmq.wire.payloads import decode_fragment, fragment_from_bytes

__all__ = ["Bound", "ReplayOptions", "describe", "replay"]

_MAX_BYTES = 1 << 30
_UPDATES = re.compile(r"(\d*)\.\.(\d*)")
_SAY_EVERY = 100
_EXIT_DIFFERS = 1


@dataclass
class ReplayOptions:
    """Options of ``rlzmq replay``."""

    path: tyro.conf.Positional[Path]
    """A run directory (or the record_dir of a run), or NAME.fragment in a run's quarantine_dir."""
    updates: str | None = None
    """Of a run: A..B, A.. or ..B; update 1 is the first, and makes weights_seq_no 1 (default: all)."""
    until: str | None = None
    """Of a run: stop at the first update whose metric crosses this bound, e.g. 'policy_loss>1e3', and leave batch and
    learner in PATH/replay (default: no bound)."""
    run_dir: Path | None = None
    """Of a fragment: run directory whose config.toml makes a learner that trains it (default: only look at it)."""
    algorithm: str | None = None
    """Of a fragment: algorithm of that run (default: the one in its run.json)."""
    trust: list[str] = field(default_factory=list)
    """Package whose code somebody else's run may name; repeatable (default: none)."""
    import_: list[str] = field(default_factory=list)
    """Module to import first, e.g. one that registers envs; repeatable (default: none)."""


@command(
    ReplayOptions,
    usage="rlzmq replay RUN_OR_FRAGMENT [options]",
    description="Repeat what the learner of a recorded run did, without environments, and compare the weights "
    "after every update bit for bit; or look at a quarantined fragment, and train it.",
)
def replay(options: ReplayOptions) -> int:
    """Run the command with `arguments`, which follow ``rlzmq replay``.

    Returns:
        The exit code: 0, 1 if weights differ, or that of the learner's error or death.
    """
    import_first(options.import_)
    return _replay_run(options) if options.path.is_dir() else _replay_fragment(options)


# ------------------------------------------------------------------ a run


def _replay_run(options: ReplayOptions) -> int:
    from rlzmq.algorithms.recorded_run import Mismatch, RecordedRun

    first, last = _range_of(options.updates)
    bound = None if options.until is None else Bound.parse(options.until)
    recorded = RecordedRun(options.path, trust=options.trust)
    for note in recorded.notes:
        print(f"note        {printable(note)}")
    print(f"recorded    updates {recorded.versions[0]} to {recorded.versions[-1]}", flush=True)
    num_equal = num_repeated = 0
    try:
        for update in recorded.updates(first, last):
            num_repeated += 1
            num_equal += update.is_compared
            if num_repeated % _SAY_EVERY == 1:
                while recorded.began_at:
                    print(f"begins with {printable(recorded.began_at.pop(0))}")
                print(f"update      {update.version}", flush=True)
            if bound is not None and num_repeated == 1:
                bound.check(update.results)
            crossed = None if bound is None else bound.crossed_by(update.results)
            if crossed is not None:
                print(f"stopped     at update {update.version}: {printable(crossed)}, bound {options.until}")
                _leave(recorded, options)
                break
    except Mismatch as error:
        print(f"DIFFERS     {printable(str(error))}")
        _leave(recorded, options)
        return _EXIT_DIFFERS
    except Exception:
        if recorded.current is not None and not recorded.current.results:
            print(f"raises      update {recorded.current.version}, see below")
            _leave(recorded, options)
        raise
    print(
        f"replayed    {num_repeated} updates: the weights after {num_equal} of them equal the recorded ones, "
        "bit for bit"
    )
    if num_equal < num_repeated:
        print(
            f"            {num_repeated - num_equal} without a recorded digest: the learner's process ended in it"
        )
    return 0


def _range_of(text: str | None) -> tuple[int | None, int | None]:
    """Return the first and the last update."""
    if text is None:
        return None, None
    found = _UPDATES.fullmatch(text)
    first, last = (int(number) if number else None for number in found.groups()) if found else (None, None)
    if found is None or (first is not None and last is not None and first > last):
        raise ConfigurationError(
            f"--updates {text!r}: expected A..B with A <= B, or A.., or ..B, e.g. 100..120."
        )
    return first, last


def _leave(recorded: Any, options: ReplayOptions) -> None:
    """Write the current update for a debugger, and print how to load it."""
    version = recorded.current.version
    path = recorded.save(options.path / "replay" / f"{version:06d}")
    trust = f", trust={options.trust}" if options.trust else ""
    load = f"learner, update = load_update({str(path)!r}{trust})"
    print(f"left        {path}: the learner before update {version}, and the batches that it trained")
    print("in Python:")
    print(f"  from rlzmq.algorithms.recorded_run import load_update; {load}")
    print("  learner.update(**update)  # repeats it", flush=True)


# ------------------------------------------------------------------ a fragment


def _replay_fragment(options: ReplayOptions) -> int:
    if (reason := _reason(options.path.with_suffix(".json"))) is not None:
        print(f"quarantined: {printable(str(reason))}")
    batch = _read(options.path)
    print("\n".join(describe(batch)), flush=True)
    if options.run_dir is not None:
        results = _train(batch, options)
        print("trained:", json.dumps(results, default=float, sort_keys=True)[:2000])
    return 0


def _reason(path: Path) -> object:
    """Return why the fragment was quarantined; None if that was not recorded."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))["reason"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} does not say why: {error!r}. Without this file the fragment can be looked at."
        ) from error


def _read(path: Path) -> object:
    """Return the fragment's EpisodeBatch."""
    if not path.is_file():
        raise ConfigurationError(f"{path} does not exist: expected a recorded run, or NAME.fragment.")
    if path.stat().st_size > _MAX_BYTES:
        raise ConfigurationError(f"{path} is no fragment: it is larger than {_MAX_BYTES >> 30} GiB.")
    try:
        header, arrays, _ = decode_fragment(fragment_from_bytes(path.read_bytes()))
        print(
            f"fragment    {header.fragment_id}: {header.num_env_steps} env steps, weights version "
            f"{header.weights_version}, generation {header.generation}"
        )
        return EpisodeBatch.from_wire(header.batch, arrays)
    except ProtocolError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def describe(batch: Any) -> list[str]:
    """Return lines about chunks, columns and values that are not finite."""
    lines = [f"chunks      {len(batch)}, {batch.num_env_steps} env steps"]
    columns: Any = dict(getattr(batch, "columns", {}))
    for (name, *inner), leaf in zip(optree.tree_paths(columns), optree.tree_leaves(columns), strict=True):
        array, where, bad = np.asarray(leaf), "".join(f"[{key!r}]" for key in inner), ""
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            slots = np.argwhere(~np.isfinite(array))
            bad = f"  NOT FINITE at {len(slots)} places, first at slot {slots[0].tolist()}"
        lines.append(f"{name + where:<28}{array.dtype.str:<6}{list(array.shape)}{bad}")
    return [printable(line) for line in lines]


def _train(batch: object, options: ReplayOptions) -> Any:
    from rlzmq.algorithms.registry import get_config_class

    assert options.run_dir is not None
    algorithm = options.algorithm or Run.open(options.run_dir).algorithm
    config = get_config_class(algorithm).from_toml(options.run_dir / "config.toml", trust=options.trust)
    config.networking(listen=None, advertise=None, join_file=None, num_remote_learners=0)
    config.learners(num_learners=0).env_runners(num_env_runners=0)
    learner = config.build_learner()
    print("training it …", flush=True)  # the last line, if it kills the process
    return learner.update(episodes=batch)


_BOUND = re.compile(r"\s*([^<>=!\s]+)\s*(<=|>=|<|>)\s*(\S+)\s*")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


@dataclass(frozen=True)
class Bound:
    """A bound on a metric: ``policy_loss>1e3``, or for one module ``default_policy/policy_loss>1e3``.

    A value that is not finite crosses every bound.
    """

    name: str
    sign: str
    number: float

    @classmethod
    def parse(cls, text: str) -> Bound:
        """Return the bound that a text describes.

        Raises:
            ConfigurationError: The text is not a bound.
        """
        found = _BOUND.fullmatch(text)
        try:
            if found is None:
                raise ValueError
            return cls(found[1], found[2], float(found[3]))
        except ValueError:
            raise ConfigurationError(
                f"{text!r} is not a bound: expected METRIC, one of < <= > >=, and a number, e.g. 'policy_loss>1e3'."
            ) from None

    def check(self, results: Mapping[str, Any]) -> None:
        """Check that an update's results contain the metric.

        Raises:
            ConfigurationError: They do not contain it.
        """
        if self._values(results):
            return
        name = self.name.rpartition("/")[2]
        known = sorted(
            {key for metrics in results.values() for key, value in metrics.items() if _is_number(value)}
        )
        raise ConfigurationError(
            f"an update of this run has no metric {self.name!r}.{did_you_mean(name, known)} It has: {', '.join(known)}"
        )

    def crossed_by(self, results: Mapping[str, Any]) -> str | None:
        """Return where, and with which value, an update's results cross the bound; None if they do not."""
        for where, value in self._values(results).items():
            if not math.isfinite(value) or _COMPARE[self.sign](value, self.number):
                return f"{where}/{self.name.rpartition('/')[2]} = {value:g}"
        return None

    def _values(self, results: Mapping[str, Any]) -> dict[str, float]:
        module_id, _, name = self.name.rpartition("/")
        return {
            where: float(metrics[name])
            for where, metrics in results.items()
            if module_id in ("", where) and _is_number(metrics.get(name))
        }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.generic)
