"""The algorithms, a folder each, and how runs of them are configured, built and trained."""

from pkgutil import iter_modules

__all__ = ["ALGORITHMS"]

ALGORITHMS: dict[str, str] = {
    folder.name: f"rlzmq.algorithms.{folder.name}:{folder.name.upper()}Config"
    for folder in iter_modules(__path__)
    if folder.ispkg
}
"""Name → config class: each folder here is an algorithm's."""
