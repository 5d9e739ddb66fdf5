"""Conversion of an algorithm's state between a tree with RLlib's names, for users, and parts, for checkpoints.

{"learner_group": {"learner": …, "replay-0": …}, …}        the tree
{"learner_group/learner": …, "learner_group/replay-0": …}  its parts
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rlzmq.core.suggest import did_you_mean

__all__ = ["COMPONENTS", "select", "to_parts", "to_tree", "wants"]

COMPONENTS = (
    "accounting",
    "algorithm",
    "env_runner",
    "evaluation",
    "learner_group",
    "modules",
)
_GROUP = "learner_group"  # each of its entries is a separate part


def to_tree(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree made of these parts."""
    tree: dict[str, Any] = {}
    for name, state in parts.items():
        top, _, rest = name.partition("/")
        if rest:
            tree.setdefault(top, {})[rest] = state
        else:
            tree[top] = state
    return tree


def to_parts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a (partial) tree. Entries that are parts already are unchanged.

    Raises:
        ValueError: A component is unknown.
    """
    parts: dict[str, Any] = {}
    for name, value in state.items():
        check_component(name)
        if name == _GROUP:
            parts |= {f"{name}/{rest}": part for rest, part in value.items()}
        else:
            parts[name] = value
    return parts


def check_component(path: str) -> None:
    """Raise ValueError if a path does not begin with the name of a component."""
    top = path.partition("/")[0]
    if top not in COMPONENTS:
        raise ValueError(f"an Algorithm's state has no component {top!r}.{did_you_mean(top, COMPONENTS)}")


def wants(
    component: str,
    components: str | Collection[str] | None,
    not_components: str | Collection[str] | None = None,
) -> bool:
    """Return whether any part of a top-level component is requested.

    Raises:
        ValueError: An unknown component is requested.
    """
    wanted, unwanted = _paths(components), _paths(not_components) or []
    return component not in unwanted and (
        wanted is None or any(path.partition("/")[0] == component for path in wanted)
    )


def select(
    tree: Mapping[str, Any],
    components: str | Collection[str] | None,
    not_components: str | Collection[str] | None = None,
) -> dict[str, Any]:
    """Return the requested part of a tree.

    Args:
        tree: A state.
        components: Paths such as ``"learner_group/learner/rl_module/p0"``; None: all. Paths that the tree lacks are
            ignored.
        not_components: Paths to leave out.

    Raises:
        ValueError: A path does not begin with the name of a component.
    """
    selected: dict[str, Any] = dict(tree) if components is None else {}
    for path in _paths(components) or ():
        selected = _with(selected, tree, path)
    for path in _paths(not_components) or ():
        selected = _without(selected, path)
    return selected


def _paths(names: str | Collection[str] | None) -> list[str] | None:
    if names is None:
        return None
    paths = [names.strip("/")] if isinstance(names, str) else [name.strip("/") for name in names]
    for path in paths:
        check_component(path)
    return paths


def _key(tree: Any, path: str) -> str | None:
    """Return the key of `tree` on the path: the whole path or its first name; None if neither exists."""
    keys = (path, path.partition("/")[0])
    return next((key for key in keys if isinstance(tree, Mapping) and key in tree), None)


def _with(selected: Mapping[str, Any], tree: Any, path: str) -> dict[str, Any]:
    key = _key(tree, path)
    if key is None:
        return dict(selected)
    rest = path[len(key) + 1 :]
    if not rest:
        return {**selected, key: tree[key]}
    inner = _with(selected.get(key, {}), tree[key], rest)
    return {**selected, key: inner} if inner else dict(selected)


def _without(tree: Mapping[str, Any], path: str) -> dict[str, Any]:
    key = _key(tree, path)
    if key is None:
        return dict(tree)
    rest = path[len(key) + 1 :]
    if not rest:
        return {name: value for name, value in tree.items() if name != key}
    return {**tree, key: _without(tree[key], rest)} if isinstance(tree[key], Mapping) else dict(tree)
