"""CURVE keys: key pairs, and the sides of an encrypted link.

libzmq asks through ZAP (RFC 27) once per connection. A thread answers, because the event loop may be
busy. The role becomes the user id of every message of that connection (``DrainSocket.sender_role``).
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import zmq
import zmq.utils.z85
from zmq.utils import z85

from rlzmq.core.errors import ConfigurationError
from rlzmq.net.context import Context

__all__ = ["Authenticator", "CurveClient", "CurveServer", "KeyPair", "check_public_key", "curve_support"]


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
