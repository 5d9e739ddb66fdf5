"""Resolves ``config.env`` and creates environments.

An environment is given as a Gymnasium id, a name registered with `register_env`, a class, a callable that takes an
`EnvContext`, or the text ``"package.module:Class"``. `resolve_env` turns any of these into an `EnvEntry`, which makes
environments and can be sent to other processes.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rlzmq.core.errors import ConfigurationError, Progress
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.trust import CALLER, Trust, find_code
from rlzmq.envs.wrappers import extra_hint, import_family, wrap_atari, wrap_env

__all__ = [
    "EnvContext",
    "EnvEntry",
    "EnvPoolVectorEnv",
    "MakingEnvs",
    "adopt_registration",
    "call_creator",
    "check_env_name",
    "make_env",
    "register_env",
    "registration_of",
    "resolve_env",
]


class EnvPoolVectorEnv(VectorEnv[Any, Any, Any]):
    """The environments of one EnvPool task, selected with e.g. ``env="envpool/CartPole-v1"``.

    The first `reset` creates the pool with its seed.

    Args:
        task_id: Id of the task in ``envpool.list_all_envs()``.
        num_envs: Number of environments.
        settings: Settings of the pool, e.g. ``num_threads=2``, or ``stack_num=4`` for Atari.

    Raises:
        ConfigurationError: EnvPool is not installed, or has no such task or setting.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, task_id: str, num_envs: int = 1, **settings: object) -> None:
        try:
            self._envpool: Any = importlib.import_module("envpool")
        except ImportError as error:
            raise ConfigurationError(
                f"config.env='envpool/{task_id}' needs envpool, which cannot be imported ({error}).{extra_hint(error)}"
            ) from error
        tasks = self._envpool.list_all_envs()
        if task_id not in tasks:
            raise ConfigurationError(f"EnvPool has no task {task_id!r}.{did_you_mean(task_id, tasks)}")
        self._task_id = task_id
        self._settings = settings
        self._pool: Any = None
        self.num_envs = num_envs
        try:
            with warnings.catch_warnings(action="ignore"):  # about the precision of bounds
                spec = self._envpool.make_spec(task_id, num_envs=num_envs, **settings)
                self.single_observation_space: gym.Space[Any] = spec.gymnasium_observation_space
                self.single_action_space: gym.Space[Any] = spec.gymnasium_action_space
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"EnvPool's {task_id} does not take the settings of config.env_config {settings}: {error}"
            ) from error
        self.observation_space: gym.Space[Any] = batch_space(self.single_observation_space, num_envs)
        self.action_space: gym.Space[Any] = batch_space(self.single_action_space, num_envs)
        self._action_dtype = getattr(self.single_action_space, "dtype", None)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all environments. A seed (an int, or one per environment) creates a new pool."""
        if self._pool is not None and seed is None:
            return self._pool.reset()[0], {}
        seeds = np.zeros(1) if seed is None else np.atleast_1d(seed)
        self.close_extras()
        with warnings.catch_warnings(action="ignore"):  # about the precision of bounds
            self._pool = self._envpool.make_gymnasium(
                self._task_id, num_envs=self.num_envs, seed=int(seeds[0]) % 2**31, **self._settings
            )
            return self._pool.reset()[0], {}

    def step(self, actions: object) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all environments. Those whose episode has ended are reset, and their actions are ignored."""
        given = np.asarray(actions, dtype=self._action_dtype)
        observations, rewards, terminations, truncations, _ = self._pool.step(given)
        return observations, rewards, terminations, truncations, {}

    def close_extras(self, **kwargs: object) -> None:
        """Stop the pool's threads."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


# First parameters with these names take the whole EnvContext, even if they have a default.
_CONTEXT_PARAMETERS = frozenset({"config", "cfg", "env_config", "context", "env_context", "ctx"})

_ENVPOOL = "envpool/"  # prefix of the ids of EnvPool's tasks

# Of Gymnasium: what uses its arguments to write files, or as the name of another library's env.
_SIDE_DOORS = frozenset({"RecordVideo", "GymV21Environment-v0", "GymV26Environment-v0"})

_CREATORS: dict[str, Callable[..., Any]] = {}

_log = logging.getLogger("rlzmq.envs")


class EnvContext(dict[str, Any]):
    """``config.env_config`` as a dict, with the environment's indices.

    Example:
        >>> context = EnvContext({"size": 5}, worker_index=2, vector_index=1, num_workers=4)
        >>> context["size"], context.worker_index
        (5, 2)

    Attributes:
        worker_index: Index of the env runner, 0 for the local one.
        vector_index: Index of the environment within its runner's vector env.
        num_workers: Number of remote env runners, or None when unknown.
        remote: True if the environment lives in a process other than its runner's.
        recreated_worker: True if the runner replaces one that died.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        worker_index: int = 0,
        vector_index: int = 0,
        remote: bool = False,
        num_workers: int | None = None,
        recreated_worker: bool = False,
    ) -> None:
        super().__init__(env_config or {})
        self.worker_index = worker_index
        self.vector_index = vector_index
        self.remote = remote
        self.num_workers = num_workers
        self.recreated_worker = recreated_worker

    def copy_with_overrides(
        self,
        env_config: Mapping[str, Any] | None = None,
        worker_index: int | None = None,
        vector_index: int | None = None,
        remote: bool | None = None,
        num_workers: int | None = None,
        recreated_worker: bool | None = None,
    ) -> EnvContext:
        """Return a copy with the given values replaced; None keeps the value."""
        return EnvContext(
            dict(self) if env_config is None else env_config,
            self.worker_index if worker_index is None else worker_index,
            self.vector_index if vector_index is None else vector_index,
            self.remote if remote is None else remote,
            self.num_workers if num_workers is None else num_workers,
            self.recreated_worker if recreated_worker is None else recreated_worker,
        )

    def set_defaults(self, defaults: Mapping[str, Any]) -> None:
        """Add those keys of ``defaults`` that are missing."""
        for key, value in defaults.items():
            self.setdefault(key, value)


@dataclass(frozen=True)
class EnvEntry:
    """A resolved ``config.env``.

    Attributes:
        label: The user's text, for messages.
        gym_id: Its Gymnasium id, or None.
        creator: The class or callable that makes it, or None for a Gymnasium id.
        is_atari: Whether to apply the Atari preprocessing (`wrap_atari`), before `wrappers`.
        wrappers: Wrappers of single environments, the first innermost.
    """

    label: str
    gym_id: str | None = None
    creator: Callable[..., Any] | None = None
    is_atari: bool = False
    wrappers: tuple[object, ...] = ()

    @property
    def is_vector_class(self) -> bool:
        """True if the creator is a class of native vector environments, or a partial of one."""
        creator = self.creator.func if isinstance(self.creator, partial) else self.creator
        return inspect.isclass(creator) and issubclass(creator, gym.vector.VectorEnv)


class MakingEnvs(Progress):
    """Logs how many of a runner's environments are made; of several runners only the first does.

    Args:
        num_envs: How many will be made.
        context: The runner's.
    """

    def __init__(self, num_envs: int, context: EnvContext) -> None:
        say = _log.warning if context.worker_index <= 1 else None
        super().__init__("made %d of %d environments", num_envs, say)

    def counting(self, creator: Callable[[], Any]) -> Callable[[], Any]:
        """Return a creator whose environments are counted."""

        def make() -> Any:
            env = creator()
            self.add()
            return env

        return make


def register_env(name: str, env_creator: Callable[..., Any]) -> None:
    """Register ``env_creator`` as ``name``, for use as ``config.environment(name)``.

    Args:
        name: Any text; a registered name takes precedence over an equal Gymnasium id.
        env_creator: Called with an `EnvContext`; returns a ``gymnasium.Env`` or a ``MultiAgentEnv``.

    Raises:
        ValueError: The name is empty.
        TypeError: The creator is not callable.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"register_env: expected a non-empty name, got {name!r}.")
    if not callable(env_creator):
        raise TypeError(
            f"register_env({name!r}): expected a callable that takes an EnvContext and returns an "
            f"environment, got {type(env_creator).__name__}."
        )
    _CREATORS[name] = env_creator


def registration_of(env: object) -> tuple[str, Any] | None:
    """Return the registration that another process needs to create the env.

    Returns:
        (name, creator or Gymnasium EnvSpec); None if the name is sufficient, or `env` is not a name.
    """
    if not isinstance(env, str):
        return None
    if env in _CREATORS:
        return env, _CREATORS[env]
    spec = gym.registry.get(env)
    if spec is None or str(spec.entry_point).startswith("gymnasium."):  # known in every process
        return None
    return env, spec


def adopt_registration(registration: tuple[str, Any] | None) -> None:
    """Register the env of a `registration_of` another process, unless its name is known in this process already."""
    if registration is None:
        return
    name, what = registration
    if isinstance(what, gym.envs.registration.EnvSpec):
        gym.registry.setdefault(name, what)
    else:
        _CREATORS.setdefault(name, what)


def resolve_env(env: object) -> EnvEntry:
    """Resolve ``config.env``.

    Args:
        env: A Gymnasium id, a registered name, a class, a callable, or ``"package.module:Class"``.

    Returns:
        The entry to make environments from.

    Raises:
        ConfigurationError: Nothing of that name exists (the text names the closest match), or ``env`` is none of the
            above.
    """
    if isinstance(env, EnvEntry):
        return env
    if env is None:
        raise ConfigurationError(
            "No environment is set: call config.environment(env=...) with a Gymnasium id, a class, a "
            "callable, or a name registered with register_env()."
        )
    if isinstance(env, str):
        return _resolve_name(env)
    if isinstance(env, gym.Env | gym.vector.VectorEnv):
        named = f"the id {env.spec.id!r}" if env.spec else f"the class ({type(env.unwrapped).__name__})"
        raise ConfigurationError(
            f"config.env is an environment instance ({env}); expected what makes one, because each runner makes its "
            f"own: pass {named} or a callable that takes an EnvContext."
        )
    if callable(env):
        return EnvEntry(label=getattr(env, "__qualname__", repr(env)), creator=env)
    raise ConfigurationError(
        f"config.env: expected a Gymnasium id, a class, a callable or a registered name, got {env!r} "
        f"({type(env).__name__})."
    )


def check_env_name(env: object, trust: Trust) -> None:
    """Check an env or a wrapper from a file: its name must be registered in this process or trusted.

    Raises:
        ConfigurationError: It is other code. That was not imported.
    """
    if trust.is_full:
        return
    if isinstance(env, type):
        if env.__module__.startswith("rlzmq.") and not issubclass(env, gym.Env | gym.vector.VectorEnv):
            raise ConfigurationError(f"{env.__name__!r} is neither an environment nor a wrapper.")
    elif isinstance(env, str) and env not in _CREATORS and env not in gym.registry:
        name = env.partition("(")[0].strip()  # a wrapper may have arguments
        if ":" in name:
            try:
                find_code(name, trust)
            except ConfigurationError:
                if not trust.covers(name) or name.partition(":")[2] not in gym.registry:
                    raise
    if isinstance(env, str) and env.partition("(")[0].strip() in _SIDE_DOORS:
        raise ConfigurationError(
            f"{env!r} is not trusted: it writes files, or imports another library's code."
        )


def make_env(env: object, env_config: Mapping[str, Any] | None = None) -> Any:
    """Make one environment.

    Args:
        env: Anything that `resolve_env` accepts.
        env_config: The environment's settings, or a whole `EnvContext`. A Gymnasium id gets the items as keyword
            arguments. A class or callable gets the context as its first argument, or no argument if it has no
            parameters. If its first parameter is not named like a config (``config``, ``env_config``, ``context``, …)
            and has a default, is one of the items, or is not the only one without a default, it gets the items as
            keyword arguments.

    Returns:
        A ``gymnasium.Env`` (or ``MultiAgentEnv``), not yet reset.

    Raises:
        ConfigurationError: The id does not exist, the settings do not fit its parameters, a library is missing, or a
            wrapper does not fit.
    """
    entry = resolve_env(env)
    context = env_config if isinstance(env_config, EnvContext) else EnvContext(env_config)
    if entry.creator is not None:
        made = call_creator(entry, context)
    else:
        assert entry.gym_id is not None
        defaults = {"frameskip": 1} if entry.is_atari else {}  # the preprocessing skips the frames itself
        made = _make_gym_env(entry.gym_id, {**defaults, **context})
    if entry.is_atari:
        made = wrap_atari(made)
    return wrap_env(made, entry.wrappers)


def _make_gym_env(gym_id: str, settings: Mapping[str, Any]) -> gym.Env[Any, Any]:
    try:
        return gym.make(gym_id, **settings)
    except gym.error.DependencyNotInstalled as error:
        hint = extra_hint(error)
        raise ConfigurationError(
            f"config.env={gym_id!r} needs a library that is not installed.{hint or f' {error}'}"
        ) from error
    except TypeError as error:
        raise ConfigurationError(
            f"gym.make({gym_id!r}) does not take the settings of config.env_config "
            f"({', '.join(map(repr, settings)) or 'none given'}): {error}"
        ) from error


def call_creator(entry: EnvEntry, context: EnvContext, **extra: object) -> Any:
    """Call an entry's class or callable with the arguments its signature takes (see ``make_env``)."""
    creator = entry.creator
    assert creator is not None
    # It may change its copy, and is called again to replace a failed environment.
    context = context.copy_with_overrides()
    try:
        parameters = list(inspect.signature(creator).parameters.values())
    except (TypeError, ValueError):  # builtins without a signature
        return creator(context, **extra)
    if extra:
        names = {parameter.name for parameter in parameters}
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        extra = {key: value for key, value in extra.items() if takes_any or key in names}
        parameters = [parameter for parameter in parameters if parameter.name not in extra]
    if not parameters:
        if context:
            raise ConfigurationError(
                f"{entry.label} takes no arguments, but config.env_config has "
                f"{', '.join(map(repr, context))}: give it a parameter, e.g. def __init__(self, config)."
            )
        return creator(**extra)
    first = parameters[0]
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    takes_context = first.kind not in (first.KEYWORD_ONLY, first.VAR_KEYWORD) and (
        first.name in _CONTEXT_PARAMETERS
        or (first.default is first.empty and first.name not in context and required[1:] == [])
    )
    missing = [name for name in required if name != first.name] if takes_context else required
    missing = [name for name in missing if takes_context or name not in context]
    if missing:
        how = (
            f"give {missing[0]!r} a default, or take it from {first.name!r}, which is the whole env_config"
            if takes_context
            else f"set config.environment(env_config={{{', '.join(f'{name!r}: …' for name in missing)}}})"
        )
        raise ConfigurationError(f"{entry.label} needs {', '.join(map(repr, missing))}: {how}.")
    if takes_context:
        return creator(context, **extra)
    known = {parameter.name for parameter in parameters}
    unknown = [key for key in context if key not in known]
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise ConfigurationError(
            f"{entry.label} has no parameter {unknown[0]!r} (from config.env_config)."
            f"{did_you_mean(unknown[0], known)}"
        )
    return creator(**context, **extra)


def _resolve_name(name: str) -> EnvEntry:
    creator = _CREATORS.get(name)
    if creator is not None:
        return EnvEntry(label=name, creator=creator)
    if name not in gym.registry:
        import_family(name)
    if name in gym.registry:
        return EnvEntry(label=name, gym_id=name)
    if name.startswith(_ENVPOOL):
        return EnvEntry(label=name, creator=partial(EnvPoolVectorEnv, name.removeprefix(_ENVPOOL)))
    if ":" in name:
        return _resolve_module_name(name)
    versions = [env_id for env_id in gym.registry if env_id.rpartition("-v")[0] == name]
    if not versions:
        raise _unknown_name(name)
    return EnvEntry(label=name, gym_id=max(versions, key=lambda env_id: int(env_id.rpartition("-v")[2])))


def _resolve_module_name(name: str) -> EnvEntry:
    """Return the entry for ``"package.module:Class"``, or Gymnasium's ``"package.module:Id-v0"``."""
    try:
        target = find_code(name, CALLER)
    except ConfigurationError as error:
        attribute = name.partition(":")[2]
        if attribute in gym.registry:  # importing the module registered it
            return EnvEntry(label=name, gym_id=attribute)
        raise ConfigurationError(
            f"config.env={name!r}: {error} Expected 'package.module:Class' with the module on the Python path of every "
            f"process.{extra_hint(error)}"
        ) from error
    if not callable(target):
        raise ConfigurationError(f"config.env={name!r} is no class or callable.")
    return EnvEntry(label=name, creator=target)


def _unknown_name(name: str) -> ConfigurationError:
    hint = did_you_mean(name, [*gym.registry, *_CREATORS]) if name else ""
    if "Did you mean" not in hint:  # the list of all ids is too long to help
        hint = " For a checkpoint, register the name in this process, too, or pass the env (env=MyEnv)."
    return ConfigurationError(
        f"config.env={name!r}: no Gymnasium id, no name registered with register_env(), and no "
        f"'package.module:Class'.{hint}"
    )
