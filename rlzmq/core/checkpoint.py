"""Checkpoints on disk: state trees as JSON and safetensors under one manifest, replaced atomically.

Layout of a checkpoint directory::

    manifest.json                    format version, size and SHA-256 of every other file, its own SHA-256, and this
                                     user's signature of that
    <component>/state.json           the component's tree (`rlzmq.core.plain`), with names of arrays
    <component>/state.safetensors    its arrays

An object store (``s3://…``) replaces only single objects atomically. There the files of each checkpoint are below a
unique prefix, which the manifest names (``"at"``). The manifest is written last, and then the previous checkpoint's
files are removed.

A component's name may contain slashes ("learner_group/learner/optimizer"). Each component can be read alone.
No code from files is run: there is no pickle, and nothing is imported here. Whether the code that a state names may be
imported depends on the signature (`rlzmq.core.trust`).

A part's own checkpoint stores its state under the same name as an algorithm's checkpoint, so both can restore it::

    learner.save_to_path("checkpoints/learner")
    learner.restore_from_path("checkpoints/learner")                        # its own
    learner.restore_from_path("checkpoints/run")                            # an algorithm's
    learner.restore_from_path("checkpoints/run/learner_group/learner")      # the same, as RLlib spells it
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, cast
from urllib.parse import unquote, urlsplit

import numpy as np

from rlzmq.core import faults
from rlzmq.core.errors import CheckpointError
from rlzmq.core.files import make_directories, opener, sync_directory, write_all
from rlzmq.core.imports import LazyModule
from rlzmq.core.plain import BASIC_TYPES, BYTES, TENSOR, NotPlainError, TreeReader, TreeWriter
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.trust import is_signed, signature_of

upath: Any = LazyModule("upath")  # needed for object stores only

__all__ = [
    "FORMAT_VERSION",
    "Checkpointable",
    "StoredCheckpoint",
    "chosen_parts",
    "find_inside",
    "is_local",
    "local_path",
    "move_tree",
    "open_checkpoint",
    "read_checkpoint",
    "read_manifest",
    "read_part",
    "remove_tree",
    "select",
    "store_errors",
    "to_tree",
    "without_objects",
    "write_checkpoint",
    "write_part",
]


class Checkpointable:
    """Mix-in with `save_to_path`, `restore_from_path` and `from_checkpoint`, based on `get_state` and `set_state`.

    A checkpoint contains no code: `from_checkpoint` takes the constructor's arguments.
    """

    checkpoint_name: ClassVar[str]
    """Name of this state in an algorithm's checkpoint."""

    def save_to_path(self, path: str | Path | None = None) -> str:
        """Write the state as a checkpoint, atomically, and return its absolute path.

        Args:
            path: The directory, or ``s3://…``. An existing one is replaced. None: a new temporary directory.

        Raises:
            CheckpointError: The checkpoint cannot be written; the content of `path` is unchanged.
        """
        return write_part(path, self.checkpoint_name, self.get_state(), type(self))  # type: ignore[attr-defined]

    def restore_from_path(self, path: str | Path, component: str | None = None) -> None:
        """Load the state of a checkpoint.

        Args:
            path: A result of `save_to_path`, an algorithm's checkpoint, or a path into one.
            component: The part of the state that is at `path`, e.g. ``"rl_module/p0"``; the rest is unchanged.

        Raises:
            CheckpointError: There is no such state, or the checkpoint is torn or altered.
        """
        self.set_state(read_part(path, self.checkpoint_name, component))  # type: ignore[attr-defined]

    @classmethod
    def from_checkpoint(cls, path: str | Path, *args: Any, **kwargs: Any) -> Self:
        """Create a new object with the state of a checkpoint.

        Args:
            path: See `restore_from_path`.
            args, kwargs: The constructor's arguments.
        """
        new = cls(*args, **kwargs)
        new.restore_from_path(path)
        return new


def write_part(path: str | Path | None, name: str, state: object, kind: type) -> str:
    """Write one part's state as its own checkpoint and return its absolute path."""
    return str(write_checkpoint(path, {name: state}, about={"part": kind.__qualname__}))


def read_part(path: str | Path, name: str, component: str | None = None) -> Any:
    """Return one part's state.

    Args:
        path: The part's own checkpoint, an algorithm's, or a path into one.
        name: The state's name in both.
        component: Path of the state below the part's name; None: the whole state.

    Raises:
        CheckpointError: There is no such component.
    """
    folder, inside = find_inside(path)
    tree = to_tree(read_checkpoint(folder))
    wanted = inside or (f"{name}/{component}" if component else name)
    state = _part_of(tree, wanted)
    if state is None:
        raise CheckpointError(f"The checkpoint {folder} has no component {wanted!r}. It has {sorted(tree)}.")
    for key in reversed((component or "").strip("/").split("/") if component else []):
        state = {key: state}
    return state


def to_tree(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return components as one tree: ``{"a/b": …}`` → ``{"a": {"b": …}}``."""
    tree: dict[str, Any] = {}
    for name, state in parts.items():
        place = tree
        *above, last = name.split("/")
        for key in above:
            place = place.setdefault(key, {})
        place[last] = state
    return tree


def chosen_parts(
    known: Iterable[str],
    components: str | Iterable[str] | None,
    not_components: str | Iterable[str] | None = None,
    *,
    whose: str = "",
) -> dict[str, tuple[list[str] | None, list[str]]]:
    """Return the chosen parts of a state, each with what is chosen and what is left out inside of it.

    Args:
        known: Names of all parts.
        components: Names, or paths such as ``"rl_module/p0"``; None: all.
        not_components: Names or paths to leave out.
        whose: What the state belongs to, for messages; "": other names than those of the parts are ignored.

    Raises:
        ValueError: There is no such part.
    """
    known = list(known)

    def by_part(paths: str | Iterable[str]) -> dict[str, list[str] | None]:
        grouped: dict[str, list[str] | None] = {}
        for path in (paths,) if isinstance(paths, str) else paths:
            path = path.strip("/")
            name, slash, rest = (path, "", "") if path in known else path.partition("/")
            if whose and name not in known:
                raise ValueError(f"{whose} has no component {name!r}.{did_you_mean(name, known)}")
            if not slash:
                grouped[name] = None
            elif (inside := grouped.setdefault(name, [])) is not None:
                inside.append(rest)
        return grouped

    wanted, without = by_part(known if components is None else components), by_part(not_components or ())
    return {
        name: (wanted[name], without.get(name) or [])
        for name in known
        if name in wanted and without.get(name, []) is not None
    }


def select(
    tree: Mapping[str, Any],
    components: str | Iterable[str] | None,
    not_components: str | Iterable[str] | None = None,
) -> dict[str, Any]:
    """Return a part of a state's tree; see `chosen_parts`. Paths that the tree lacks are ignored."""
    selected: dict[str, Any] = {}
    for name, (inside, outside) in chosen_parts(tree, components, not_components).items():
        value = tree[name]
        if is_cut := isinstance(value, Mapping) and bool(inside or outside):
            value = select(value, inside, outside)
        if not inside or (is_cut and value):
            selected[name] = value
    return selected


def _part_of(tree: Any, path: str) -> Any:
    """Return the value at a path, or None; the tree for "". Keys (module ids) may have slashes."""
    if not path:
        return tree
    if not isinstance(tree, Mapping):
        return None
    key = path if path in tree else path.partition("/")[0]
    return _part_of(tree[key], path[len(key) + 1 :]) if key in tree else None


FORMAT_VERSION = 4
_MANIFEST = "manifest.json"
_FORMAT = "rlzmq-checkpoint"
_KEYS = {"format", "version", "about", "files", "sha256", "signature"}
# A manifest names files, with some hundred bytes each. The decoded tree takes many times that much memory.
_MAX_MANIFEST_BYTES = 16 * 1024 * 1024
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # Path("s3://bucket") has only one slash


def local_path(path: str | Path) -> Path:
    """Return the absolute path. ``~`` is the home directory; ``file://`` URIs name local files.

    Other URIs, such as ``s3://…``, become paths of universal-pathlib, which have the methods of Path.

    Raises:
        CheckpointError: It is the URI of an unknown filesystem, of one whose driver is not installed, or of files on
            another machine.
    """
    if not is_local(path):
        return cast(Path, path)
    text = os.fspath(path)
    scheme = _SCHEME.match(text)
    if scheme is None:
        return Path(path).expanduser().absolute()
    if scheme[1].lower() != "file":
        return _path_in_store(scheme[1].lower(), text[scheme.end() :])
    uri = urlsplit(text)
    if uri.netloc not in ("", "localhost"):
        raise CheckpointError(
            f"{text!r} is not a directory of this machine: a file:// URI has three slashes, file:///{uri.netloc}{uri.path}."
        )
    return Path(unquote(uri.path))


def is_local(path: object) -> bool:
    """Return whether the path is on this machine, and not in an object store."""
    return isinstance(path, str | Path | os.PathLike)


def _path_in_store(scheme: str, key: str) -> Path:
    """Return the path in an object store."""
    uri = f"{scheme}://{'/'.join(filter(None, key.split('/')))}"
    try:
        path = upath.UPath(uri, use_listings_cache=False)
        assert path.fs is not None  # imports its driver
    except ImportError as error:
        raise CheckpointError(f"{uri!r} needs a package: pip install 'rlzmq[cloud]' ({error}).") from None
    except ValueError as error:
        raise CheckpointError(
            f"{uri!r} is neither a directory on this machine nor a store that fsspec knows ({error}). Use a local or "
            "mounted directory, s3://…, or gs://…."
        ) from None
    return cast(Path, path)


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Convert errors of a store's driver to OSErrors."""
    try:
        yield
    except (OSError, ValueError):
        raise
    except Exception as error:  # each driver has its own error types
        raise OSError(f"{type(error).__name__}: {error}") from error


def write_checkpoint(
    path: str | Path | None, components: Mapping[str, Any], *, about: Mapping[str, Any] | None = None
) -> Path:
    """Write a checkpoint atomically: at any time `path` contains either the old or the new one.

    Args:
        path: The checkpoint's directory. An existing one is replaced. None: a new one in the temporary directory,
            which is removed if writing fails.
        components: ``{name: state}``; a state is a tree of dicts, lists, tuples, plain values and numpy arrays.
        about: Plain facts for the manifest, e.g. the algorithm's name.

    Returns:
        The absolute path.

    Raises:
        CheckpointError: The disk is full or `path` cannot be written; the content of `path` is unchanged.
        TypeError: A state contains something that is neither plain nor an array.
    """
    if path is None:
        made = Path(tempfile.mkdtemp(prefix="rlzmq-checkpoint-"))
        try:
            return write_checkpoint(made / "checkpoint", components, about=about)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    target = local_path(path)
    if not is_local(target):
        _put(target, components, about)
        return target
    scratch = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        make_directories(scratch)
        faults.at("checkpoint.boundary")
        files: dict[str, dict[str, Any]] = {}
        for name, state in components.items():
            make_directories(scratch / name)
            for file_name, data in _files_of(name, state).items():
                _write_file(scratch / file_name, data)
                files[file_name] = _facts_of(data)
        _write_file(scratch / _MANIFEST, _manifest(files, about))
        for folder, _, _ in os.walk(scratch):
            sync_directory(Path(folder))
            faults.at("checkpoint.boundary")
        _put_in_place(scratch, target)
    except OSError as error:
        raise CheckpointError(f"Cannot write a checkpoint to {target}: {error}.") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    faults.at("checkpoint.boundary")
    return target


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint that was read and checked.

    Attributes:
        path: Its directory.
        about: The facts in its manifest.
        is_mine: Whether it carries this user's signature, as it was written.
        components: ``{name: state}``.
    """

    path: Path
    about: dict[str, Any]
    is_mine: bool
    components: dict[str, Any]


def read_checkpoint(path: str | Path, component: str | None = None) -> dict[str, Any]:
    """Return the components of `open_checkpoint`."""
    return open_checkpoint(path, component).components


def open_checkpoint(path: str | Path, component: str | None = None) -> StoredCheckpoint:
    """Read a checkpoint, after checking every file against the manifest.

    Args:
        path: The checkpoint's directory.
        component: Read only the components with this name or below it.

    Raises:
        CheckpointError: There is no checkpoint, a file is missing, torn or altered, or the version is unknown.
    """
    folder = _present(local_path(path))
    manifest = read_manifest(folder)
    while True:
        try:
            components = _read(folder, manifest, component)
            is_mine = is_signed("checkpoint", manifest["sha256"].encode(), manifest["signature"])
            return StoredCheckpoint(folder, manifest["about"], is_mine, components)
        except CheckpointError:
            if is_local(folder):
                raise
            former, manifest = manifest, read_manifest(folder)
            if manifest == former:
                raise  # otherwise it was replaced in the meantime


def _read(folder: Path, manifest: Mapping[str, Any], component: str | None) -> dict[str, Any]:
    names = sorted({str(Path(name).parent.as_posix()) for name in manifest["files"]})
    if component is not None:
        names = [name for name in names if name == component or name.startswith(component + "/")]
        if not names:
            raise CheckpointError(f"The checkpoint {folder} has no component {component!r}.")
    contents = {
        name: _checked_bytes(folder, name, facts)
        for name, facts in manifest["files"].items()
        if Path(name).parent.as_posix() in names
    }
    return {name: _read_component(folder, name, contents) for name in names}


def read_manifest(path: str | Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint: format, version, about, files.

    Raises:
        CheckpointError: There is no checkpoint, or one of another version.
    """
    folder = _present(local_path(path))
    try:
        manifest = json.loads(_bytes_of(folder / _MANIFEST, _MAX_MANIFEST_BYTES))
        digest = _digest_of(manifest) if isinstance(manifest, dict) else ""
    except (FileNotFoundError, NotADirectoryError):
        what = "is not a checkpoint: it has no " + _MANIFEST if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder} {what}. Expected a run, or what save_to_path() wrote.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"The manifest of the checkpoint {folder} is torn: {error}.") from None
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise CheckpointError(f"{folder / _MANIFEST} is not the manifest of an rlzmq checkpoint.")
    if manifest.get("version") != FORMAT_VERSION:
        raise CheckpointError(
            f"The checkpoint {folder} is of format version {manifest.get('version')!r}; this release reads "
            f"version {FORMAT_VERSION}. Use the release that wrote it."
        )
    if set(manifest) != _KEYS or manifest["sha256"] != digest:
        raise CheckpointError(
            f"The manifest of the checkpoint {folder} was altered: it differs from its SHA-256."
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(_is_inside(name) for name in files):
        raise CheckpointError(f"The manifest of the checkpoint {folder} lists no files, or files outside it.")
    if not all(_is_file_entry(facts) for facts in files.values()):
        raise CheckpointError(
            f"The manifest of the checkpoint {folder} lists a file without its size and SHA-256."
        )
    if not isinstance(manifest.get("about"), dict):
        raise CheckpointError(f"The manifest of the checkpoint {folder} has no facts about it.")
    return manifest


def find_inside(path: str | Path) -> tuple[Path, str]:
    """Split a path into a checkpoint's path and the path inside of it.

    Example: ``runs/c/learner_group/learner`` → (``runs/c``, ``"learner_group/learner"``). The component
    need not exist. Without a checkpoint, return (`path`, ``""``).
    """
    place = local_path(path)
    for folder in (place, *place.parents):
        try:
            read_manifest(folder)
        except CheckpointError:
            continue
        return folder, place.relative_to(folder).as_posix() if folder != place else ""
    return place, ""


def remove_tree(path: Path) -> None:
    """Remove a directory, ignoring errors."""
    if is_local(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    place: Any = path
    with contextlib.suppress(OSError), store_errors():
        place.fs.rm(place.path, recursive=True)


def move_tree(path: Path, target: Path) -> None:
    """Rename a directory. In an object store it is copied, then removed."""
    if is_local(path):
        path.rename(target)
        return
    place, to = cast(Any, path), cast(Any, target)
    with store_errors():
        place.fs.mv(place.path, to.path, recursive=True)


def _put(target: Path, components: Mapping[str, Any], about: Mapping[str, Any] | None) -> None:
    """Write a checkpoint to an object store: files, then manifest; then remove the previous files."""
    own = f"files-{uuid.uuid4().hex[:8]}"
    files: dict[str, dict[str, Any]] = {}
    try:
        for name, state in components.items():
            for file_name, data in _files_of(name, state).items():
                faults.at("checkpoint.boundary")
                _put_object(target / own / file_name, data)
                files[file_name] = {**_facts_of(data), "at": f"{own}/{file_name}"}
        faults.at("checkpoint.boundary")
        _put_object(target / _MANIFEST, _manifest(files, about))
        faults.at("checkpoint.boundary")
        with store_errors():
            former = [place for place in target.iterdir() if place.name not in (_MANIFEST, own)]
    except OSError as error:
        raise CheckpointError(f"Cannot write a checkpoint to {target}: {error}.") from error
    for place in former:
        remove_tree(place)


def _put_object(path: Any, data: bytes) -> None:
    """Write an object. Stores do this atomically, and later reads return the new one."""
    with store_errors():
        path.fs.pipe_file(path.path, data)


def _facts_of(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _manifest(files: Mapping[str, Any], about: Mapping[str, Any] | None) -> bytes:
    facts = {"format": _FORMAT, "version": FORMAT_VERSION, "about": dict(about or {}), "files": dict(files)}
    digest = _digest_of(facts)
    signature = signature_of("checkpoint", digest.encode())
    return json.dumps({**facts, "sha256": digest, "signature": signature}, indent=1).encode()


def _files_of(name: str, state: object) -> dict[str, bytes]:
    """Return one component's files: name below the checkpoint → content."""
    from safetensors.numpy import save

    if not _is_inside(f"{name}/state.json"):
        raise ValueError(f"component name {name!r}: expected relative names joined by slashes.")
    writer = _FileWriter()
    files = {f"{name}/state.json": json.dumps(writer.write(state, name)).encode()}
    if writer.arrays:
        files[f"{name}/state.safetensors"] = save(writer.arrays)
    return files


def _read_component(folder: Path, name: str, contents: Mapping[str, bytes]) -> object:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        packed = contents.get(f"{name}/state.safetensors")
        arrays = load(packed) if packed is not None else {}
        return _FileReader(arrays).read(json.loads(contents[f"{name}/state.json"]))
    except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise CheckpointError(
            f"Component {name!r} of the checkpoint {folder} cannot be read: {error!r}."
        ) from None


def _checked_bytes(folder: Path, name: str, facts: dict[str, Any]) -> bytes:
    try:
        data = _bytes_of(folder / facts.get("at", name), facts["bytes"])
    except (OSError, ValueError) as error:
        raise CheckpointError(f"The checkpoint {folder} is torn: {name} cannot be read ({error}).") from None
    if len(data) != facts["bytes"]:
        raise CheckpointError(
            f"The checkpoint {folder} is torn: {name} holds {len(data)} bytes, the manifest says {facts['bytes']}."
        )
    if hashlib.sha256(data).hexdigest() != facts["sha256"]:
        raise CheckpointError(f"The checkpoint {folder} was altered: {name} differs from its SHA-256.")
    return data


class _FileWriter(TreeWriter):
    """Converts a state to JSON, with arrays in a second file."""

    types = BASIC_TYPES.with_types(BYTES, TENSOR)
    leaves = frozenset({type(None), bool, str, float})

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}

    def place(self, array: np.ndarray, where: str) -> Any:
        if array.dtype.kind not in "biuf":
            raise NotPlainError(f"{where}: expected an array of numbers, got dtype {array.dtype}.")
        key = str(len(self.arrays))
        self.arrays[key] = np.ascontiguousarray(array).reshape(array.shape)
        return key

    def other(self, value: object, where: str, depth: int) -> Any:
        kinds: tuple[Any, ...] = (float, int, str, list, tuple)
        for kind in kinds:
            if isinstance(value, kind):
                return self.write(kind(value), where, depth)
        return super().other(value, where, depth)


def without_objects(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict without the items that checkpoints cannot hold, e.g. objects that users log."""
    kept = {}
    for key, value in values.items():
        with contextlib.suppress(NotPlainError):
            _FileWriter().write(value)
            kept[key] = value
    return kept


class _FileReader(TreeReader):
    """Reads the output of `_FileWriter`."""

    types = _FileWriter.types

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = dict(arrays)

    def fetch(self, place: Any) -> np.ndarray:
        return self._arrays.pop(place)  # each is stored once: what is read takes the memory of the file


def _digest_of(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its digest and signature."""
    facts = {key: value for key, value in manifest.items() if key not in ("sha256", "signature")}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _present(folder: Path) -> Path:
    """Return the directory, or its backup if a replacement was interrupted between two renames."""
    if is_local(folder) and not folder.exists() and folder.parent.is_dir():
        for aside in folder.parent.glob(f".{glob.escape(folder.name)}.*.old"):
            return aside
    return folder


def _is_inside(name: object) -> bool:
    return isinstance(name, str) and bool(name) and not name.startswith("/") and ".." not in Path(name).parts


def _is_file_entry(facts: object) -> bool:
    return (
        isinstance(facts, dict)
        and type(facts.get("bytes")) is int
        and facts["bytes"] >= 0
        and isinstance(facts.get("sha256"), str)
        and _is_inside(facts.get("at", "here"))
    )


def _bytes_of(path: Path, max_bytes: int) -> bytes:
    """Return a regular file's content. Pipes and devices, which may never end, are not read."""
    if not is_local(path):
        with store_errors():
            if (size := path.stat().st_size) > max_bytes:
                raise ValueError(f"it holds {size} bytes, at most {max_bytes} are expected")
            return path.read_bytes()
    # A file object closes what it cannot read, a directory.
    with open(
        path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
    ) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_size > max_bytes:
            raise ValueError(f"it holds {status.st_size} bytes, at most {max_bytes} are expected")
        return file.read()


def _write_file(path: Path, data: bytes) -> None:
    with open(path, "wb", buffering=0, opener=opener) as file:
        faults.at("checkpoint.boundary")
        half = len(data) // 2 if faults.is_armed else 0  # so that an injected fault leaves a torn file
        for part in (data[:half], data[half:]):
            write_all(file, part)
            faults.at("checkpoint.boundary")
        os.fsync(file.fileno())
        faults.at("checkpoint.boundary")


def _put_in_place(scratch: Path, target: Path) -> None:
    """Replace the old directory with the new one. If names cannot be exchanged, move the old one away first."""
    if not target.exists():
        os.rename(scratch, target)
    elif not _exchange(scratch, target):
        aside = scratch.with_suffix(".old")
        os.rename(target, aside)
        faults.at("checkpoint.boundary")
        try:
            os.rename(scratch, target)
        except OSError:
            os.rename(aside, target)
            raise
        faults.at("checkpoint.boundary")
        shutil.rmtree(aside, ignore_errors=True)
    faults.at("checkpoint.boundary")
    sync_directory(target.parent)
    faults.at("checkpoint.boundary")


def _exchange(a: Path, b: Path) -> bool:
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0)
