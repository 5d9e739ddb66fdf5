"""CloudPath: a path in an object store, for checkpoints."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from rlzmq.core.errors import CheckpointError

__all__ = ["CloudPath"]

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)  # Path("s3://bucket") has only one slash
_DRIVERS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}


class CloudPath:
    """The part of `pathlib.Path` that checkpoints use, implemented with fsspec.

    Object stores write single objects atomically, and later reads return the new object. Writing several objects and
    renaming are not atomic.

    Args:
        uri: ``"s3://bucket/runs/mine"``, ``"gs://…"``, or the URI of another filesystem that fsspec knows.

    Raises:
        CheckpointError: There is no such filesystem, or its driver is not installed.
    """

    def __init__(self, uri: str) -> None:
        match = _URI.fullmatch(uri)
        if match is None:
            raise CheckpointError(f"{uri!r}: expected scheme://place.")
        self._scheme, key = match[1].lower(), match[2].strip("/")
        self._key = "/".join(part for part in key.split("/") if part)
        assert self._store is not None

    @cached_property
    def _store(self) -> tuple[Any, str]:
        """Return (the filesystem, this path's key in it)."""
        import fsspec

        try:
            filesystem, key = fsspec.core.url_to_fs(str(self), use_listings_cache=False)
        except ImportError as error:
            driver = _DRIVERS.get(self._scheme, "the driver of that filesystem")
            raise CheckpointError(
                f"{str(self)!r} needs {driver}, which is not installed: pip install 'rlzmq[cloud]' ({error})."
            ) from None
        except ValueError as error:
            raise CheckpointError(
                f"{str(self)!r} is neither a directory on this machine nor a store that fsspec knows ({error}). Use a "
                "local or mounted directory, s3://…, or gs://…."
            ) from None
        return filesystem, str(key)

    # -- names ----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The extension of the last part, with its dot."""
        _, dot, ending = self.name.rpartition(".")
        return dot + ending if dot else ""

    @property
    def parents(self) -> list[CloudPath]:
        """The parent paths, nearest first; the bucket is the last one."""
        parts = self._key.split("/")
        return [
            CloudPath(f"{self._scheme}://{'/'.join(parts[:num])}") for num in range(len(parts) - 1, 0, -1)
        ]

    def __truediv__(self, below: str) -> CloudPath:
        return CloudPath(f"{self}/{below}")

    def with_name(self, name: str) -> CloudPath:
        """Return the sibling path with this name."""
        return CloudPath(f"{self._scheme}://{self._key.rpartition('/')[0]}/{name}")

    def relative_to(self, above: CloudPath) -> CloudPath:
        """Return this path relative to another. Only `as_posix` may be called on the result."""
        return CloudPath(f"{self._scheme}://{self._key.removeprefix(above._key)}")

    def as_posix(self) -> str:
        """Return the key, without the scheme."""
        return self._key

    # -- objects --------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Return whether there is an object at this path or below it."""
        filesystem, key = self._store
        with _store_errors():
            return bool(filesystem.exists(key))

    def is_dir(self) -> bool:
        """Return whether there are objects below this path."""
        filesystem, key = self._store
        with _store_errors():
            return bool(filesystem.isdir(key))

    def read_bytes(self, max_bytes: int | None = None) -> bytes:
        """Read the object.

        Raises:
            OSError: There is none, or the store does not answer.
            ValueError: It is larger than `max_bytes`.
        """
        filesystem, key = self._store
        with _store_errors():
            size = filesystem.size(key)
            if max_bytes is not None and size is not None and size > max_bytes:
                raise ValueError(f"it holds {size} bytes, at most {max_bytes} are expected")
            return bytes(filesystem.cat_file(key))

    def write_bytes(self, data: bytes) -> None:
        """Write the object atomically.

        Raises:
            OSError: The store does not take it.
        """
        filesystem, key = self._store
        with _store_errors():
            filesystem.pipe_file(key, data)

    def iterdir(self) -> Iterator[CloudPath]:
        """Yield the direct children."""
        filesystem, key = self._store
        with contextlib.suppress(FileNotFoundError), _store_errors():
            for entry in filesystem.ls(key, detail=False):
                name = str(entry).rstrip("/").rpartition("/")[2]
                if name and name != self.name:
                    yield self / name

    def rename(self, target: CloudPath) -> None:
        """Copy everything below this path to `target`, then remove the originals."""
        filesystem, key = self._store
        with _store_errors():
            filesystem.mv(key, target._store[1], recursive=True)

    def remove(self) -> None:
        """Remove this object and all objects below it."""
        filesystem, key = self._store
        with contextlib.suppress(FileNotFoundError), _store_errors():
            filesystem.rm(key, recursive=True)

    # -- values ---------------------------------------------------------------------------------

    def __str__(self) -> str:
        return f"{self._scheme}://{self._key}"

    def __repr__(self) -> str:
        return f"CloudPath({str(self)!r})"

    def __fspath__(self) -> str:
        return str(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CloudPath) and str(self) == str(other)

    def __lt__(self, other: CloudPath) -> bool:
        return str(self) < str(other)

    def __hash__(self) -> int:
        return hash(str(self))


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    """Convert errors of a store's driver to OSErrors."""
    try:
        yield
    except (OSError, ValueError):
        raise
    except Exception as error:  # each driver has its own error types
        raise OSError(f"{type(error).__name__}: {error}") from error
