"""CloudPath: a place in an object store, for checkpoints that are read and written there."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from rlzmq.core.errors import CheckpointError

__all__ = ["CloudPath"]

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)  # Path("s3://bucket") has one slash only
_DRIVERS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}


class CloudPath:
    """What checkpoints use of `pathlib.Path`, over fsspec.

    Guarantees of the stores: an object is put as a whole or not at all, and who reads it afterwards gets the new one.
    Several objects are not put at once, and nothing is renamed at once.

    Args:
        uri: ``"s3://bucket/runs/mine"``, ``"gs://…"``, or of any other filesystem that fsspec knows.

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
        """(the filesystem, this place's key in it)."""
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
                f"{str(self)!r} is no directory of this machine, and no store that fsspec knows ({error}). Give a "
                "local or mounted directory, s3://…, or gs://…."
            ) from None
        return filesystem, str(key)

    # -- names ----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The last part."""
        return self._key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The last part's ending, with its dot."""
        _, dot, ending = self.name.rpartition(".")
        return dot + ending if dot else ""

    @property
    def parents(self) -> list[CloudPath]:
        """The places above, nearest first; the bucket is the last."""
        parts = self._key.split("/")
        return [
            CloudPath(f"{self._scheme}://{'/'.join(parts[:num])}") for num in range(len(parts) - 1, 0, -1)
        ]

    def __truediv__(self, below: str) -> CloudPath:
        return CloudPath(f"{self}/{below}")

    def with_name(self, name: str) -> CloudPath:
        """The place beside this one."""
        return CloudPath(f"{self._scheme}://{self._key.rpartition('/')[0]}/{name}")

    def relative_to(self, above: CloudPath) -> CloudPath:
        """What of this place is below another; only to be asked for its name (`as_posix`)."""
        return CloudPath(f"{self._scheme}://{self._key.removeprefix(above._key)}")

    def as_posix(self) -> str:
        """The key, without the scheme."""
        return self._key

    # -- objects --------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Whether there is an object here, or any below."""
        filesystem, key = self._store
        with _store_errors():
            return bool(filesystem.exists(key))

    def is_dir(self) -> bool:
        """Whether there are objects below."""
        filesystem, key = self._store
        with _store_errors():
            return bool(filesystem.isdir(key))

    def read_bytes(self, max_bytes: int | None = None) -> bytes:
        """The object here.

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
        """Put an object here, as a whole.

        Raises:
            OSError: The store does not take it.
        """
        filesystem, key = self._store
        with _store_errors():
            filesystem.pipe_file(key, data)

    def iterdir(self) -> Iterator[CloudPath]:
        """What is right below."""
        filesystem, key = self._store
        with contextlib.suppress(FileNotFoundError), _store_errors():
            for entry in filesystem.ls(key, detail=False):
                name = str(entry).rstrip("/").rpartition("/")[2]
                if name and name != self.name:
                    yield self / name

    def rename(self, target: CloudPath) -> None:
        """Copy everything below, then remove it here."""
        filesystem, key = self._store
        with _store_errors():
            filesystem.mv(key, target._store[1], recursive=True)

    def remove(self) -> None:
        """Remove the object here, and all below."""
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
    """Errors of a store's driver as OSErrors, which is what files have."""
    try:
        yield
    except (OSError, ValueError):
        raise
    except Exception as error:  # each driver has errors of its own
        raise OSError(f"{type(error).__name__}: {error}") from error
