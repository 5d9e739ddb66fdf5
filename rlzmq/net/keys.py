"""CURVE keys: key pairs, the sides of an encrypted link, and join files, which carry keys to other machines.

libzmq asks through ZAP (RFC 27) once per connection. A thread answers, because the event loop may be
busy. The role becomes the user id of every message of that connection (``DrainSocket.sender_role``).
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import zmq
import zmq.utils.z85
from zmq.utils import z85

from rlzmq.core.addresses import check_connect_address, split_tcp
from rlzmq.core.errors import ConfigurationError, PeerLostError
from rlzmq.core.files import read_private_file, write_text
from rlzmq.core.process import process_space, start_mark
from rlzmq.core.synonyms import did_you_mean
from rlzmq.net.context import Context

__all__ = [
    "Authenticator",
    "CurveClient",
    "CurveServer",
    "JoinFile",
    "KeyPair",
    "check_public_key",
    "curve_support",
    "writer_of",
]


ZAP_DOMAIN = b"rlzmq"
_Z85_KEY_CHARS = 40


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


_ENDPOINT = "inproc://zeromq.zap.01"
_NUM_REQUEST_FRAMES = 6  # version, request id, domain, address, routing id, mechanism; then credentials


class Authenticator:
    """Authenticates the clients of all CURVE servers of one context. Start it before they bind.

    A key that is not listed, another mechanism or another domain is refused and counted.

    Args:
        context: The context whose servers it guards.
        roles: Public key → role.

    Raises:
        ConfigurationError: A key is malformed, or the context has an authenticator already.
    """

    def __init__(self, context: Context, roles: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._roles = {check_public_key(public_key): role for public_key, role in roles.items()}
        self._refused: Counter[str] = Counter()
        self._num_accepted = 0
        self._accepted_roles: dict[str, set[str]] = {}
        self._barred: set[tuple[str, str]] = set()
        self._context = context
        self._raw = context.open_socket(zmq.ROUTER, self)
        self._raw.set(zmq.LINGER, 0)
        try:
            self._raw.bind(_ENDPOINT)
        except zmq.ZMQError as error:
            self._raw.close()
            context.forget(self)
            raise ConfigurationError(
                "this context already has an authenticator: give that one all keys"
            ) from error
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="rlzmq-authenticator", daemon=True)
        self._thread.start()

    @property
    def num_accepted(self) -> int:
        """Connections accepted so far."""
        return self._num_accepted

    @property
    def num_refused(self) -> dict[str, int]:
        """Connections refused so far, by reason."""
        with self._lock:
            return dict(self._refused)

    def roles_at(self, address: str) -> list[str]:
        """Return the roles of the keys that were accepted from a network address."""
        with self._lock:
            return sorted(self._accepted_roles.get(address, ()))

    def bar(self, role: str, address: str) -> None:
        """Refuse further connections with the key of a role from a network address; open ones stay."""
        with self._lock:
            self._barred.add((role, address))

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        if not self._thread.is_alive():
            return
        os.write(self._wake_write, b"x")
        self._thread.join()
        os.close(self._wake_write)
        os.close(self._wake_read)
        self._context.forget(self)

    def __enter__(self) -> Authenticator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._raw, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake_read in ready:
                break
            self._answer(self._raw.recv_multipart())
        self._raw.close(0)

    def _answer(self, frames: list[bytes]) -> None:
        # A ROUTER in place of the usual REP: the requester's routing id and an empty frame come first.
        envelope, request = frames[:2], frames[2:]
        if len(request) < _NUM_REQUEST_FRAMES or request[0] != b"1.0":
            return
        request_id, domain, raw_address, _, mechanism = request[1:_NUM_REQUEST_FRAMES]
        address = raw_address.decode(errors="replace")
        role, reason = self._judge(domain, mechanism, request[_NUM_REQUEST_FRAMES:])
        with self._lock:
            if role is not None and (role, address) in self._barred:
                role, reason = None, "cut for a flood"
            if role is None:
                self._refused[reason] += 1
            else:
                self._num_accepted += 1
                self._accepted_roles.setdefault(address, set()).add(role)
        status, text = (b"200", b"OK") if role is not None else (b"400", b"refused")
        self._raw.send_multipart([*envelope, b"1.0", request_id, status, text, (role or "").encode(), b""])

    def _judge(self, domain: bytes, mechanism: bytes, credentials: list[bytes]) -> tuple[str | None, str]:
        if domain != ZAP_DOMAIN:
            return None, "wrong domain"
        if mechanism != b"CURVE" or len(credentials) != 1 or len(credentials[0]) != 32:
            return None, "no key"
        return self._roles.get(z85.encode(credentials[0]).decode()), "unknown key"


_KEYS = ("role", "server_public_key", "client_secret_key", "addresses")
_HEADER = "# Anyone who reads this file can join the run in the role below. Keep it private.\n"


def writer_of(run_id: str) -> dict[str, str]:
    """Return what a join file says of its run and of the process that writes it: this one."""
    pid = os.getpid()
    return {
        "run": run_id,
        "host": socket.gethostname(),
        "pid": str(pid),
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "space": process_space(),
        "mark": start_mark(pid) or "",
    }


@dataclass(frozen=True, slots=True)
class JoinFile:
    """Addresses and keys of one run for one role, as a TOML file of mode 0600.

    Attributes:
        role: The role that the key allows, e.g. ``"runner"``.
        addresses: Channel name → address, e.g. ``{"control": "tcp://10.0.0.5:5555"}``.
        server_public_key: Proves the other side; empty without keys (ipc, insecure).
        client_secret_key: Proves this side; empty without keys.
        writer: What `writer_of` returned to the run's head; {} if the file is written by hand.
    """

    role: str
    addresses: Mapping[str, str]
    server_public_key: str = ""
    client_secret_key: str = field(default="", repr=False)
    writer: Mapping[str, str] = field(default_factory=dict)

    def curve(self) -> CurveClient | None:
        """Return the keys for ``DrainSocket(curve=…)``; None if the run has no keys."""
        if not self.server_public_key:
            return None
        return CurveClient(self.server_public_key, KeyPair.from_secret(self.client_secret_key))

    def absence(self, channel: str) -> str:
        """Return what a peer is told at once if nothing listens at an address of the file."""
        by = f", written by {self.writer['host']} at {self.writer['written']}," if self.writer else ""
        return (
            f"nothing listens at {self.addresses[channel]}: the run of this join file{by} has ended, or its head is "
            "being started again"
        )

    def to_text(self) -> str:
        """Return the file's text, e.g. for the standard input of a process elsewhere."""
        # JSON strings are TOML basic strings as long as nothing beyond ASCII stays unescaped.
        lines = [f"{key} = {json.dumps(getattr(self, key))}" for key in _KEYS if key != "addresses"]
        for table in ("addresses", "writer"):
            lines += ["", f"[{table}]"]
            lines += [
                f"{json.dumps(name)} = {json.dumps(value)}" for name, value in getattr(self, table).items()
            ]
        return _HEADER + "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str, *, source: str = "join file") -> JoinFile:
        """Parse and check the file's text.

        Raises:
            ConfigurationError: The text is not TOML; a key is unknown, missing or of the wrong type; an
                address or a CURVE key is malformed.
        """
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(f"{source} is not valid TOML: {error}") from error
        for key in data:
            if key not in (*_KEYS, "writer"):
                raise ConfigurationError(f"{source}: unknown key {key!r}.{did_you_mean(key, _KEYS)}")
        data.setdefault("writer", {})
        for key in (*_KEYS, "writer"):
            expected = dict if key in ("addresses", "writer") else str
            if not isinstance(data.get(key), expected):
                found = "nothing" if key not in data else repr(data[key])[:40]
                kind = "a table" if expected is dict else "a string"
                raise ConfigurationError(f"{source}: {key} must be {kind}, got {found}")
        has_keys = bool(data["server_public_key"])
        if has_keys:
            check_public_key(data["server_public_key"])
            KeyPair.from_secret(data["client_secret_key"])
        for name, address in data["addresses"].items():
            if not isinstance(address, str):
                raise ConfigurationError(f"{source}: addresses.{name} must be a string, got {address!r}")
            check_connect_address(address, has_keys=has_keys, insecure=True)
        return cls(**data)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file atomically, with mode 0600."""
        write_text(path, self.to_text(), is_private=True)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> JoinFile:
        """Read a join file.

        Raises:
            ConfigurationError: As in :meth:`from_text`; or the file is missing, or readable by others.
            PeerLostError: The process that wrote it, on this machine, has ended, and no other has taken its place.
        """
        join = cls.from_text(read_private_file(path), source=os.fspath(path))
        writer = join.writer
        has_ended = (
            writer.get("space") == process_space() and start_mark(int(writer["pid"])) != writer["mark"]
        )
        if has_ended and not _is_listening(join.addresses["data"]):
            raise PeerLostError(
                f"{path} is of a run that is gone: {writer['run']}, whose head (pid {writer['pid']} on "
                f"{writer['host']}) wrote it at {writer['written']} and has ended. Start the head again first."
            )
        return join


def _is_listening(address: str) -> bool:
    """Return whether somebody listens at an address of this machine, e.g. the head that was started again."""
    try:
        with socket.create_connection(split_tcp(address), timeout=1.0):
            return True
    except OSError:
        return False
