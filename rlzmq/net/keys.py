"""CURVE keys: key pairs, and the sides of an encrypted link."""

from __future__ import annotations

from dataclasses import dataclass, field

import zmq
import zmq.utils.z85

from rlzmq.core.errors import ConfigurationError

__all__ = [
    "ZAP_DOMAIN",
    "CurveClient",
    "CurveServer",
    "KeyPair",
    "check_public_key",
    "curve_support",
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
