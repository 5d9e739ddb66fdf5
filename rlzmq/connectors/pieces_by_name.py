"""Access to a pipeline's pieces and their states by unique names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.core.suggest import did_you_mean

__all__ = ["PieceRef", "PiecesByName", "name_set"]

PieceRef: TypeAlias = str | type[ConnectorV2] | ConnectorV2


class PiecesByName(ConnectorV2):
    """Base class of pipelines: uniquely named pieces with a common state.

    Attributes:
        connectors: The pieces, in order.
    """

    connectors: list[ConnectorV2]

    @property
    def piece_names(self) -> list[str]:
        """The unique name of each piece, in order."""
        counts: dict[str, int] = {}
        names = []
        for piece in self.connectors:
            name = type(piece).__name__
            counts[name] = counts.get(name, 0) + 1
            names.append(name if counts[name] == 1 else f"{name}_{counts[name]}")
        return names

    def index(self, name_or_class: PieceRef) -> int:
        """Return the position of a piece. Argument and errors are those of `insert_before`."""
        names = self.piece_names
        for index, piece in enumerate(self.connectors):
            if isinstance(name_or_class, str):
                found = names[index] == name_or_class
            elif isinstance(name_or_class, type):
                found = type(piece) is name_or_class
            else:
                found = piece is name_or_class
            if found:
                return index
        wanted = getattr(name_or_class, "__name__", name_or_class)
        raise ValueError(
            f"{type(self).__name__} has no connector piece {wanted!r}.{did_you_mean(wanted, names)}"
        )

    # -- state, by unique piece name ------------------------------------------------------------

    def get_state(
        self,
        components: str | Sequence[str] | None = None,
        *,
        not_components: str | Sequence[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return piece name -> state, without stateless pieces.

        Args:
            components: Names of the pieces to include; None: all.
            not_components: Names of pieces to leave out.
        """
        wanted, unwanted = name_set(components), name_set(not_components) or set()
        state = {}
        for name, piece in zip(self.piece_names, self.connectors, strict=True):
            if (wanted is None or name in wanted) and name not in unwanted:
                piece_state = piece.get_state(**kwargs)
                if piece_state:
                    state[name] = piece_state
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state from `get_state`. Pieces that it does not name keep their state.

        Raises:
            ValueError: The state names a piece that this pipeline does not have.
        """
        for name, piece_state in state.items():
            self.connectors[self.index(name)].set_state(piece_state)

    def reset_state(self) -> None:
        """Reset every piece."""
        for piece in self.connectors:
            piece.reset_state()

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Merge the states of copies of this pipeline, piece by piece, matched by name."""
        merged = {}
        for name, piece in zip(self.piece_names, self.connectors, strict=True):
            of_piece = [state[name] for state in states if state.get(name)]
            piece_state = piece.merge_states(of_piece) if of_piece else {}
            if piece_state:
                merged[name] = piece_state
        return merged

    def get_delta(self) -> dict[str, Any]:
        """Return piece name -> delta since the last call, without empty deltas."""
        deltas = [piece.get_delta() if piece.has_delta else {} for piece in self.connectors]
        if not any(deltas):
            return {}
        return {name: delta for name, delta in zip(self.piece_names, deltas, strict=True) if delta}

    def merge_deltas(self, deltas: Sequence[dict[str, Any]]) -> None:
        """Merge the deltas of copies of this pipeline into its pieces, matched by name."""
        by_name: dict[str, list[dict[str, Any]]] = {}
        for delta in deltas:
            for name, piece_delta in delta.items():
                by_name.setdefault(name, []).append(piece_delta)
        for name, piece_deltas in by_name.items():
            self.connectors[self.index(name)].merge_deltas(piece_deltas)

    def apply_merged_state(self, state: dict[str, Any]) -> None:
        """Load a merged state; each piece keeps its unsent delta."""
        for name, piece_state in state.items():
            self.connectors[self.index(name)].apply_merged_state(piece_state)

    def freeze_statistics(self) -> None:
        """Stop all pieces from learning from samples."""
        for piece in self.connectors:
            piece.freeze_statistics()

    @property
    def required_lookback(self) -> int:
        """The largest lookback of any piece, in steps."""
        return max((piece.required_lookback for piece in self.connectors), default=0)


def name_set(names: Any) -> set[Any] | None:
    """Return one name or several as a set of names, or None."""
    if names is None:
        return None
    return {names} if isinstance(names, str) else set(names)
