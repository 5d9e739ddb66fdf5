"""CURVE keys: key pairs, the sides of an encrypted link, and files that only their owner may read."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.utils.z85

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import sync_directory

__all__ = [
    "ZAP_DOMAIN",
    "CurveClient",
    "CurveServer",
    "KeyPair",
    "check_public_key",
    "curve_support",
    "read_private_file",
    "write_private_file",
]

ZAP_DOMAIN = b"rlzmq"
_Z85_KEY_CHARS = 40
_STDIN = ("-", "/dev/stdin")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE25519 key pair in libzmq's Z85 text form, 40 characters each. Its repr hides the secret."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def generate(cls) -> KeyPair:
        """Generate a new key pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    @classmethod
    def from_secret(cls, secret: str) -> KeyPair:
        """Return the key pair of a secret key.

        Raises:
            ConfigurationError: The text is not a key.
        """
        _check_key(secret, "secret")
        return cls(zmq.curve_public(secret.encode()).decode(), secret)


@dataclass(frozen=True, slots=True)
class CurveServer:
    """The side that binds: proves itself with ``keys`` and asks the authenticator about every client."""

    keys: KeyPair

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self.keys.secret.encode())
        socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        # Fail closed: without this option and without a running authenticator libzmq lets any key in.
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)


@dataclass(frozen=True, slots=True)
class CurveClient:
    """The side that connects: accepts only the server with ``server_public``."""

    server_public: str
    keys: KeyPair

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        socket.set(zmq.CURVE_SERVERKEY, check_public_key(self.server_public).encode())
        socket.set(zmq.CURVE_PUBLICKEY, self.keys.public.encode())
        socket.set(zmq.CURVE_SECRETKEY, self.keys.secret.encode())


def curve_support() -> tuple[str, bool]:
    """Return libzmq's version and whether it was built with CURVE."""
    return zmq.zmq_version(), bool(zmq.has("curve"))


def check_public_key(key: str) -> str:
    """Return ``key`` if it is a public key.

    Raises:
        ConfigurationError: The text is not a Z85 key of 40 characters.
    """
    _check_key(key, "public")
    return key


def _check_key(key: str, kind: str) -> None:
    try:
        is_valid = len(key) == _Z85_KEY_CHARS and len(zmq.utils.z85.decode(key.encode("ascii"))) == 32
    except (ValueError, KeyError, UnicodeEncodeError):
        is_valid = False
    if not is_valid:
        raise ConfigurationError(
            f"not a {kind} key: expected {_Z85_KEY_CHARS} Z85 characters, got {len(key)} characters"
        )


def write_private_file(path: str | os.PathLike[str], text: str) -> None:
    """Write a file atomically, with mode 0600: it is never visible half-written or readable by others."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_directory(target.parent)


def read_private_file(path: str | os.PathLike[str], *, max_bytes: int = 64 * 1024) -> str:
    """Read a file that holds secrets.

    Args:
        path: The file; ``-`` is standard input of any kind (/dev/stdin cannot be opened if it is a socket). A file
            in the volume of a Kubernetes secret may be readable by its group: with an fsGroup, kubelet sets
            this mode whatever the volume's defaultMode, and only the pod is in that group.
        max_bytes: A larger file is refused.

    Raises:
        ConfigurationError: The file is missing, larger than ``max_bytes``, or readable by other users.
    """
    try:
        is_stdin = os.fspath(path) in _STDIN
        fd = os.dup(0) if is_stdin else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigurationError(f"cannot read {os.fspath(path)}: {error.strerror}") from error
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd).st_mode
        if not stat.S_ISSOCK(status):  # a socket's mode means nothing
            _check_mode(os.fspath(path), stat.S_IMODE(status))
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ConfigurationError(
            f"{os.fspath(path)} is larger than {max_bytes} bytes: not a key or join file"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigurationError(f"{os.fspath(path)} is not a text file") from None


def _check_mode(path: str, mode: int) -> None:
    if not mode & 0o077:
        return
    cure = f"chmod 600 {path}"
    # Kubelet links the files of a secret's volume to ..data, itself a link, and lets the pod's group read them.
    directory = os.path.dirname(path)
    if os.path.islink(os.path.join(directory, "..data")) and os.path.islink(path):
        if not mode & 0o037:
            return
        cure = "give the pod's secret volume defaultMode: 0400"
    raise ConfigurationError(
        f"{path} holds a secret key and others may read it (mode {mode:04o}): {cure}, and replace the keys "
        "if others had access"
    )
