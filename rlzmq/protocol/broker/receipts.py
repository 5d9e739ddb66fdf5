"""Receipts: pending acknowledgements of fragments, which are accepted first and may be forgotten later."""

from __future__ import annotations

from rlzmq.protocol.ledger import RunnerRecord
from rlzmq.wire.fragment_message import to_spans
from rlzmq.wire.messages import Spans
from rlzmq.wire.schema import FragmentId

__all__ = ["Receipts"]


class Receipts:
    """Acknowledgements to be sent to runners.

    A runner keeps a fragment until it *may be forgotten*: it is committed, and the driver has the report of its end.
    Being committed is not enough, because a restarted broker rebuilds missing reports from the fragments that runners
    send again.
    """

    def __init__(self) -> None:
        self._accepted: dict[str, set[int]] = {}
        self._forgettable: dict[tuple[str, int], RunnerRecord] = {}
        self._news_for: set[tuple[str, int]] = set()

    # ------------------------------------------------------------------ accepted

    def accept(self, runner: str, seq: int) -> None:
        """Acknowledge a fragment that is in the ledger."""
        self._accepted.setdefault(runner, set()).add(seq)

    def take_accepted(self, runner: str) -> Spans:
        """Return and clear the accepted sequence numbers not yet sent to this runner."""
        return to_spans(self._accepted.pop(runner, ()))

    def runners_to_tell(self) -> list[str]:
        """Return the runners for which `take_accepted` is not empty."""
        return list(self._accepted)

    # ------------------------------------------------------------------ may be forgotten

    def may_forget(self, runner: str, incarnation: int) -> RunnerRecord:
        """Return the record of the fragments that this runner may forget."""
        return self._forgettable.setdefault((runner, incarnation), RunnerRecord())

    def let_go(self, fragment: FragmentId) -> None:
        """Let the runner forget a fragment: the driver has the report of its end."""
        self.may_forget(fragment.runner, fragment.incarnation).commit(fragment.seq)
        self._news_for.add((fragment.runner, fragment.incarnation))

    def let_go_below(self, fragment: FragmentId) -> None:
        """Let the runner forget all fragments before this one."""
        self.may_forget(fragment.runner, fragment.incarnation).commit_below(fragment.seq)
        self._news_for.add((fragment.runner, fragment.incarnation))

    def take_news(self) -> list[tuple[str, int]]:
        """Return (runner, incarnation) of the runners that may forget more since the last call, sorted."""
        news = sorted(self._news_for)
        self._news_for.clear()
        return news

    # ------------------------------------------------------------------ removed runners

    def forget_peer(self, runner: str) -> None:
        """Discard the acknowledgements of a runner that is no longer registered. It asks again on its return."""
        self._accepted.pop(runner, None)

    def forget_record(self, runner: str, incarnation: int) -> None:
        """Discard the record of a runner that may not come back."""
        self._forgettable.pop((runner, incarnation), None)
