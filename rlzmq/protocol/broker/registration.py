"""Registration of peers: names, incarnations, fencing, and the learner generation."""

from __future__ import annotations

from dataclasses import replace

from rlzmq.core.patience import NARROW_PATH, Patience
from rlzmq.protocol.broker.state import BrokerState, Peer, PublishedState
from rlzmq.protocol.core import Received
from rlzmq.wire.messages import Goodbye, Hello, Refused, Welcome

__all__ = ["Registration"]

_MAX_NEWCOMERS = 1024  # of one origin: more than the runners of one host
_MAX_NAME = 200
_MAX_ENVS = 2**20
_MAX_RANKS = 2**16
_ROLES = frozenset({"runner", "learner", "driver", "observer"})


class Registration:
    """Registers, fences and forgets peers.

    A name belongs to one process at a time: a newer process (with a higher incarnation, or one that asks for an
    incarnation) fences its predecessor, whose later messages are refused and counted. While a process is registered,
    an external runner can replace it only by naming it.
    """

    def __init__(self, state: BrokerState, store: PublishedState) -> None:
        self._state = state
        self._store = store

    def hello(self, routing: bytes, hello: Hello, now: float, origin: str = "") -> Peer | None:
        """Register a peer and return it; None if it was refused, or the HELLO was late or a duplicate."""
        state = self._state
        known_hello = state.hello_ids.get(hello.uuid, 0)
        if hello.hello_id <= known_hello:
            registered = state.by_routing.get(routing)
            if registered is not None and registered.hello == hello:
                self._welcome(registered)
            return None
        refusal = self._mismatch(hello) or self._fence_reason(hello) or self._crowd(hello, origin)
        if refusal is not None:
            state.count_refused(refusal[0])
            state.send(routing, Refused(*refusal, hello.generation))
            if refusal[0] != "fenced":
                state.notify("refused", hello.role, hello.name, refusal[1])
            return None
        incarnation = self._incarnation(hello)
        known = state.names.get((hello.role, hello.name))
        is_same = known is not None and known[0] == hello.uuid
        if known is not None and not is_same and hello.role != "learner":
            self._fence(hello, known[0])
        if hello.replaces and hello.replaces not in state.runners:
            state.fence(hello.replaces)  # an earlier broker knew it: it has ended, and its data will not come
        if origin and is_same and hello.role == "runner" and state.returns.try_again(hello.uuid):
            state.notify("path", "runner", hello.name, NARROW_PATH)
        state.know(hello, incarnation)
        seated = state.by_routing.get(routing)
        if seated is not None and (seated.uuid, seated.hello.role) != (hello.uuid, hello.role):
            self.forget(seated, "left", f"its connection now belongs to {hello.name}")
        previous = self._registered(hello)
        if previous is not None and previous.routing != routing:
            state.by_routing.pop(previous.routing, None)
        if previous is not None:
            # A new object: what waits for the connection of the old one recognizes that it is over.
            peer = replace(previous, routing=routing, hello=hello, incarnation=incarnation, heard_at=now)
            peer.next_update, peer.is_suspect, peer.connector_version = hello.next_update, False, -1
        else:
            peer = Peer(routing, hello, incarnation, now, next_update=hello.next_update)
            peer.silence = Patience(state.options.peer_timeout_s)
            peer.origin = "" if (hello.uuid, incarnation) in state.ledger.runners else origin
        peer.silence.begin(now)
        state.by_routing[routing] = peer
        self._welcome(peer)
        self._seat(peer, is_new=not is_same)
        return peer

    def forget(self, peer: Peer, event: str, detail: str = "") -> None:
        """Unregister a peer that left or was lost. Its leases are freed, its fragments kept."""
        state = self._state
        state.by_routing.pop(peer.routing, None)
        role = peer.hello.role
        if role == "runner" and state.runners.get(peer.uuid) is peer:
            del state.runners[peer.uuid]
            state.leases.forget_peer(peer.uuid)
            state.receipts.forget_peer(peer.uuid)
            state.forget_envs(peer)
        elif role == "learner" and state.ranks.get(peer.hello.rank) is peer:
            del state.ranks[peer.hello.rank]
        elif role == "driver" and state.driver is peer:
            state.driver = None
        if peer.origin:
            state.forget_newcomer(peer)
        state.notify(event, role, peer.hello.name, detail)

    def on_goodbye(self, peer: Peer, message: Goodbye, event: Received, now: float) -> None:
        """Unregister a peer that leaves in order."""
        self.forget(peer, "left", message.reason)

    def expel(self, peer: Peer, detail: str) -> None:
        """Unregister and fence a peer's process. A new process may take its name."""
        self._state.fence(peer.uuid)
        self._state.send(peer, Refused("expelled", detail[:1000], peer.hello.generation))
        self.forget(peer, "expelled", detail)

    # ------------------------------------------------------------------ private

    def _crowd(self, hello: Hello, origin: str) -> tuple[str, str] | None:
        state = self._state
        if not origin or (hello.uuid, self._incarnation(hello)) in state.ledger.runners:
            return None
        others = (peer for peer in state.by_routing.values() if peer.uuid != hello.uuid)
        if sum(peer.origin == origin for peer in others) < _MAX_NEWCOMERS:
            return None
        return "crowd", f"too many processes from {origin} have registered without working"

    def _welcome(self, peer: Peer) -> None:
        state, options = self._state, self._state.options
        message = Welcome(
            options.run_id, peer.hello.hello_id, options.incarnation, peer.incarnation, options.heartbeat_s
        )
        state.send(peer, message)

    def _mismatch(self, hello: Hello) -> tuple[str, str] | None:
        state = self._state
        if hello.role not in _ROLES:
            return "role", f"role {hello.role[:60]!r} is not one of {sorted(_ROLES)}"
        if not (0 < len(hello.name) <= _MAX_NAME and 0 < len(hello.uuid) <= _MAX_NAME) or "\n" in hello.uuid:
            return (
                "identity",
                f"a peer has a name and a uuid, of at most {_MAX_NAME} characters, without newlines",
            )
        if hello.run_id and hello.run_id != state.options.run_id:
            return (
                "run_id",
                f"this broker serves run {state.options.run_id!r}, the peer is of {hello.run_id!r}",
            )
        if hello.role == "runner" and not 1 <= hello.num_envs <= _MAX_ENVS:
            return "num_envs", f"a runner has 1 to {_MAX_ENVS} envs, got {hello.num_envs}"
        if hello.role == "learner" and not 0 <= hello.rank < hello.num_ranks <= _MAX_RANKS:
            return "rank", f"rank {hello.rank} of {hello.num_ranks} ranks does not exist"
        for field in ("package_version", "spaces_digest"):
            theirs, ours = getattr(hello, field), state.references.get(field, "")
            if hello.role != "driver" and theirs and ours and theirs != ours:
                return field, f"{field}: the run has {ours!r}, the peer has {theirs[:200]!r}"
        return None

    def _fence_reason(self, hello: Hello) -> tuple[str, str] | None:
        state = self._state
        if hello.uuid in state.fenced:
            return "fenced", f"{hello.name!r} was superseded by a newer process of that name"
        if hello.role == "learner":
            # Learners are fenced by generation: a dead rank's successor always has a later one.
            newest = max(state.generation, state.min_generation)
            if hello.generation < newest:
                return "fenced", f"the learners are at generation {newest}, this one is of {hello.generation}"
            seated = state.ranks.get(hello.rank)
            if hello.generation == state.generation and (
                (seated is not None and seated.uuid != hello.uuid) or hello.num_ranks != state.num_ranks
            ):
                return "fenced", f"rank {hello.rank} of generation {hello.generation} is taken"
            return None
        known = state.names.get((hello.role, hello.name))
        if known is None or known[0] == hello.uuid:
            return None
        # External names (name@host) are public; only the process's launcher knows its uuid.
        if (
            hello.role == "runner"
            and "@" in hello.name
            and hello.replaces != known[0]
            and known[0] in state.runners
        ):
            return "name", f"{hello.name!r} is the name of another runner, which is registered"
        if 0 < hello.incarnation <= known[1]:
            return "fenced", f"{hello.name!r} runs as incarnation {known[1]}, this one is {hello.incarnation}"
        return None

    def _incarnation(self, hello: Hello) -> int:
        known = self._state.names.get((hello.role, hello.name))
        if known is not None and known[0] == hello.uuid:
            return known[1]
        return hello.incarnation or (known[1] + 1 if known is not None else 1)

    def _fence(self, hello: Hello, uuid: str) -> None:
        state = self._state
        state.fence(uuid)
        for peer in [peer for peer in state.by_routing.values() if peer.uuid == uuid]:
            state.send(peer, Refused("fenced", f"{hello.name!r} was superseded by a newer process"))
            self.forget(peer, "fenced", f"superseded by {hello.uuid}")

    def _registered(self, hello: Hello) -> Peer | None:
        state = self._state
        if hello.role == "runner":
            return state.runners.get(hello.uuid)
        if hello.role == "learner":
            return next((peer for peer in state.ranks.values() if peer.uuid == hello.uuid), None)
        return state.driver if hello.role == "driver" else None

    def _seat(self, peer: Peer, *, is_new: bool) -> None:
        state, hello = self._state, peer.hello
        if hello.role == "runner":
            state.runners[hello.uuid] = peer
            state.leases.changed.add(hello.uuid)
            peer.first_unacked = hello.first_unacked
            state.forgetters[hello.uuid] = None
            state.ledger.commit_below(hello.uuid, peer.incarnation, hello.first_unacked)
            self._store.greet(peer)
        elif hello.role == "learner":
            if hello.generation > state.generation:
                state.generation = hello.generation
                state.num_ranks = hello.num_ranks
                state.ranks.clear()
            state.ranks[hello.rank] = peer
        elif hello.role == "driver":
            state.driver = peer
            for field in ("package_version", "spaces_digest"):
                if getattr(hello, field):
                    state.references[field] = getattr(hello, field)
            self._turn_away_strangers()
            while state.notices:
                state.send(peer, state.notices.popleft())
        if is_new:
            state.notify("joined", hello.role, hello.name, f"incarnation {peer.incarnation}")

    def _turn_away_strangers(self) -> None:
        """Refuse peers that registered before the driver with another config or version."""
        state = self._state
        for peer in list(state.by_routing.values()):
            refusal = None if peer is state.driver else self._mismatch(peer.hello)
            if refusal is not None:
                state.count_refused(refusal[0])
                state.send(peer, Refused(*refusal, peer.hello.generation))
                self.forget(peer, "refused", refusal[1])
