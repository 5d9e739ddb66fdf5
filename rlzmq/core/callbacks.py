"""Callback: user code that is called at a run's events, as a class or as single functions."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypedDict

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.signatures import check_takes

__all__ = [
    "HOOKS",
    "RUNNER_HOOKS",
    "Callback",
    "CallbackList",
    "Hooks",
    "RLlibCallback",
    "check_hook",
    "check_hooks",
    "hooks_of",
]


class Callback:
    """Base class of callbacks: override the hooks you need. All arguments are keywords; end with ``**kwargs``.

    Hooks that are not overridden cost nothing, since the sampling loop does not call them.
    """

    def on_algorithm_init(self, *, algorithm: Any, metrics_logger: Any, **kwargs: object) -> None:
        """Called after an Algorithm was set up, before its first iteration."""

    def on_algorithm_end(self, *, algorithm: Any, metrics_logger: Any, **kwargs: object) -> None:
        """Called when an Algorithm is stopped, while its processes still run. Not called if it was never set up."""

    def on_train_result(
        self, *, algorithm: Any, metrics_logger: Any, result: dict[str, Any], **kwargs: object
    ) -> None:
        """Called after an iteration; `result` may be changed in place."""

    def on_evaluate_start(self, *, algorithm: Any, metrics_logger: Any, **kwargs: object) -> None:
        """Called before an evaluation round."""

    def on_evaluate_end(
        self, *, algorithm: Any, metrics_logger: Any, evaluation_metrics: dict[str, Any], **kwargs: object
    ) -> None:
        """Called after an evaluation round; `evaluation_metrics` may be changed in place."""

    def on_evaluate_offline_start(self, *, algorithm: Any, metrics_logger: Any, **kwargs: object) -> None:
        """Called before an evaluation on recorded data."""

    def on_evaluate_offline_end(
        self, *, algorithm: Any, metrics_logger: Any, evaluation_metrics: dict[str, Any], **kwargs: object
    ) -> None:
        """Called after an evaluation on recorded data; `evaluation_metrics` may be changed in place."""

    def on_env_runners_recreated(
        self,
        *,
        algorithm: Any,
        env_runner_group: Any,
        env_runner_indices: list[int],
        is_evaluation: bool,
        **kwargs: object,
    ) -> None:
        """Called after dead runners were replaced."""

    def on_checkpoint_loaded(self, *, algorithm: Any, **kwargs: object) -> None:
        """Called after the algorithm's state was restored."""

    def on_environment_created(
        self, *, env_runner: Any, metrics_logger: Any, env: Any, env_context: Any, **kwargs: object
    ) -> None:
        """Called after a runner created its (vector) env."""

    def on_episode_created(
        self,
        *,
        episode: Any,
        env_runner: Any,
        metrics_logger: Any,
        env: Any,
        env_index: int,
        rl_module: Any,
        **kwargs: object,
    ) -> None:
        """Called after an episode object was created, before its env's reset."""

    def on_episode_start(
        self,
        *,
        episode: Any,
        env_runner: Any,
        metrics_logger: Any,
        env: Any,
        env_index: int,
        rl_module: Any,
        **kwargs: object,
    ) -> None:
        """Called when an episode has its reset observation, after the env-to-module pipeline has processed it."""

    def on_episode_step(
        self,
        *,
        episode: Any,
        env_runner: Any,
        metrics_logger: Any,
        env: Any,
        env_index: int,
        rl_module: Any,
        **kwargs: object,
    ) -> None:
        """Called when an episode has another step."""

    def on_episode_end(
        self,
        *,
        episode: Any,
        prev_episode_chunks: list[Any],
        env_runner: Any,
        metrics_logger: Any,
        env: Any,
        env_index: int,
        rl_module: Any,
        **kwargs: object,
    ) -> None:
        """Called when an episode is done, just after its last `on_episode_step`."""

    def on_sample_end(self, *, env_runner: Any, metrics_logger: Any, samples: Any, **kwargs: object) -> None:
        """Called when a `sample()` call returns `samples`."""


RLlibCallback = Callback

HOOKS: tuple[str, ...] = tuple(name for name in vars(Callback) if name.startswith("on_"))

RUNNER_HOOKS: tuple[str, ...] = tuple(
    name for name in HOOKS if name.startswith(("on_environment_", "on_episode_", "on_sample_"))
)
"""The hooks that env runners call, in their own processes. The others are called in the driver's process."""

# Hooks of RLlib's older callbacks, which would never be called.
_FORMER_HOOKS = {
    "on_learn_on_batch": "Use a learner connector, or a Learner's before_gradient_based_update()",
    "on_postprocess_trajectory": "Use a learner connector",
    "on_create_policy": "Use on_algorithm_init",
    "on_sub_environment_created": "Use on_environment_created",
    "on_workers_recreated": "Use on_env_runners_recreated",
}

Functions = Callable[..., Any] | list[Callable[..., Any]]


class Hooks(TypedDict, total=False):
    """The keyword arguments of `AlgorithmConfig.callbacks`, so that editors and type checkers know the hooks."""

    on_algorithm_init: Functions
    on_algorithm_end: Functions
    on_train_result: Functions
    on_evaluate_start: Functions
    on_evaluate_end: Functions
    on_evaluate_offline_start: Functions
    on_evaluate_offline_end: Functions
    on_env_runners_recreated: Functions
    on_checkpoint_loaded: Functions
    on_environment_created: Functions
    on_episode_created: Functions
    on_episode_start: Functions
    on_episode_step: Functions
    on_episode_end: Functions
    on_sample_end: Functions


class _HasCallbacks(Protocol):
    callbacks_class: Any
    callbacks_hooks: dict[str, Any]


class CallbackList:
    """All callbacks of one config: classes first, then functions, in the given order.

    Args:
        config: Read for `callbacks_class` (a class, an instance or a list) and `callbacks_hooks`.

    Attributes:
        hooks: Hook → the functions of the callbacks that override it, in order.
    """

    def __init__(self, config: _HasCallbacks) -> None:
        classes = getattr(config, "callbacks_class", None) or []
        listed = list(classes) if isinstance(classes, list | tuple) else [classes]
        objects = [
            item() if isinstance(item, type) or not isinstance(item, Callback) else item for item in listed
        ]
        functions = getattr(config, "callbacks_hooks", None) or {}
        self.hooks: dict[str, list[Any]] = {}
        for item in objects:
            self.add(item)
        for name in HOOKS:
            if functions.get(name):
                self.hooks.setdefault(name, []).extend(functions[name])

    def add(self, callback: Any) -> None:
        """Add an object whose overridden hooks are called after all others."""
        for name in _overridden(type(callback)):
            self.hooks.setdefault(name, []).append(getattr(callback, name))

    def __bool__(self) -> bool:
        return bool(self.hooks)

    def call(self, name: str, **kwargs: Any) -> None:
        """Call the hook `name` of all callbacks that override it, in order."""
        for function in self.hooks.get(name, ()):
            function(**kwargs)


def _overridden(kind: type) -> list[str]:
    return [name for name in HOOKS if getattr(kind, name, None) not in (None, getattr(Callback, name))]


def hooks_of(item: object) -> list[str]:
    """Return the hooks that a callbacks class or instance overrides; all hooks for a factory."""
    if not isinstance(item, type | Callback):
        return list(HOOKS)
    return _overridden(item if isinstance(item, type) else type(item))


def check_hook(name: str, function: Callable[..., Any], what: str) -> None:
    """Check that a function takes the arguments of the hook `name`.

    Raises:
        ConfigurationError: It does not, or is a coroutine function, which env runners do not await; the text begins
            with `what`.
    """
    if name in RUNNER_HOOKS and inspect.iscoroutinefunction(function):
        raise ConfigurationError(
            f"{what}: env runners call {name} while they sample: write def, not async def."
        )
    parameters = inspect.signature(getattr(Callback, name)).parameters.values()
    check_takes(function, what, by_name=[p.name for p in parameters if p.kind is p.KEYWORD_ONLY])


def check_hooks(item: object) -> None:
    """Check the hooks of a callbacks class: that all are called, and with arguments that they take.

    Args:
        item: A class, which need not derive from `Callback`; an instance; or a factory, which cannot be inspected.

    Raises:
        ConfigurationError: A method ``on_…`` is a misspelt hook, or one of RLlib's older callbacks; or a hook does not
            take its arguments.
    """
    if not isinstance(item, type | Callback):
        return
    kind = item if isinstance(item, type) else type(item)
    for name in hooks_of(kind):
        method = inspect.getattr_static(kind, name)
        if hasattr(method, "__get__"):  # bound to any object, since there may be no instance yet
            check_hook(name, method.__get__(object(), kind), f"callbacks({kind.__name__})")
    for name in dir(kind):
        if not name.startswith("on_") or name in HOOKS or not callable(getattr(kind, name)):
            continue
        close = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.75)
        hint = f"Did you mean {close[0]!r}?" if close else ""
        if name in _FORMER_HOOKS:
            hint = f"{_FORMER_HOOKS[name]}."
        if hint:
            raise ConfigurationError(
                f"callbacks({kind.__name__}): its method {name!r} is not a hook and would never be called. {hint}"
            )
