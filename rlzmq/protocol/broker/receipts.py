"""What runners are to be told of their fragments: accepted; and later, may be forgotten."""

from __future__ import annotations

from rlzmq.protocol.ledger import RunnerRecord
from rlzmq.wire.messages import Spans
from rlzmq.wire.ranges import to_spans
from rlzmq.wire.schema import FragmentId

__all__ = ["Receipts"]


class Receipts:
    """Acknowledgements on their way to runners.

    A runner keeps a fragment until it *may be forgotten*: it is done with, and the driver has the report that
    says so. That is later than the ledger's committed, because a broker after this one makes reports that
    the driver lacks anew, from what runners send it again.
    """

    def __init__(self) -> None:
        self._accepted: dict[str, set[int]] = {}
        self._forgettable: dict[tuple[str, int], RunnerRecord] = {}
        self._news_for: set[tuple[str, int]] = set()

    # ------------------------------------------------------------------ accepted

    def accept(self, runner: str, seq: int) -> None:
        """This fragment is in the ledger (and on disk, if there is a journal)."""
        self._accepted.setdefault(runner, set()).add(seq)

    def take_accepted(self, runner: str) -> Spans:
        """Accepted sequence numbers that this runner was not told of yet."""
        return to_spans(self._accepted.pop(runner, ()))

    def runners_to_tell(self) -> list[str]:
        """Runners for whom `take_accepted` has something."""
        return list(self._accepted)

    # ------------------------------------------------------------------ may be forgotten

    def may_forget(self, runner: str, incarnation: int) -> RunnerRecord:
        """What this runner need not keep any more; commit to it what it will be told of anyway."""
        return self._forgettable.setdefault((runner, incarnation), RunnerRecord())

    def let_go(self, fragment: FragmentId) -> None:
        """The driver has the report of this fragment's end: its runner is told soon."""
        self.may_forget(fragment.runner, fragment.incarnation).commit(fragment.seq)
        self._news_for.add((fragment.runner, fragment.incarnation))

    def let_go_below(self, fragment: FragmentId) -> None:
        """The same of all this runner's fragments before this one."""
        self.may_forget(fragment.runner, fragment.incarnation).commit_below(fragment.seq)
        self._news_for.add((fragment.runner, fragment.incarnation))

    def take_news(self) -> list[tuple[str, int]]:
        """(runner, incarnation) of those that may forget more than they were told, in a fixed order."""
        news = sorted(self._news_for)
        self._news_for.clear()
        return news

    # ------------------------------------------------------------------ who is gone

    def forget_peer(self, runner: str) -> None:
        """It is not registered any more: it asks again should it come back."""
        self._accepted.pop(runner, None)

    def forget_record(self, runner: str, incarnation: int) -> None:
        """It may not come back."""
        self._forgettable.pop((runner, incarnation), None)
