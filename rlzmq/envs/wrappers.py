"""``config.wrappers``: wrappers of single environments, named as text or given as code."""

from __future__ import annotations

import ast
import fnmatch
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.trust import CALLER, find_code

__all__ = [
    "EXTRAS",
    "Wrapper",
    "extra_hint",
    "import_family",
    "resolve_wrapper",
    "split_wrappers",
    "wrap_atari",
    "wrap_env",
]


# Top-level module -> what to install: an extra of rlzmq, or a package without wheels for some systems.
EXTRAS = {
    "ale_py": "rlzmq[atari]",
    "cv2": "rlzmq[atari]",
    "Box2D": "rlzmq[box2d]",
    "dm_control": "rlzmq[dm-control]",
    "envpool": "envpool",
    "minigrid": "rlzmq[minigrid]",
    "mujoco": "rlzmq[mujoco]",
    "pettingzoo": "rlzmq[marl]",
    "shimmy": "rlzmq[dm-control]",
}

# Pattern of ids -> the module that registers them with Gymnasium when it is imported.
_FAMILIES = {
    "ALE/*": "ale_py",
    "*NoFrameskip-v[04]": "ale_py",
    "MiniGrid-*": "minigrid",
    "BabyAI-*": "minigrid",
    "dm_control/*": "shimmy",
}


def import_family(env_id: str) -> None:
    """Import the library that registers a Gymnasium id, if the id's form tells which library it is.

    Raises:
        ConfigurationError: The library cannot be imported. The text names the extra to install.
    """
    for pattern, module in _FAMILIES.items():
        if fnmatch.fnmatchcase(env_id, pattern):
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise ConfigurationError(
                    f"config.env={env_id!r} needs {module}, which cannot be imported ({error}).{extra_hint(error)}"
                ) from error
            return


def extra_hint(error: BaseException) -> str:
    """Return a sentence that names what to install after a failed import; "" if unknown.

    Example:
        >>> extra_hint(ModuleNotFoundError("No module named 'ale_py'", name="ale_py"))
        " Install it: pip install 'rlzmq[atari]'."
    """
    cause: BaseException | None = error
    while cause is not None:
        module = (getattr(cause, "name", None) or "") if isinstance(cause, ImportError) else ""
        if package := EXTRAS.get(module.partition(".")[0]):
            return f" Install it: pip install {package!r}."
        cause = cause.__cause__ or cause.__context__
    return ""


Wrapper = Callable[[Any], Any]

_FORMS = (
    "a wrapper of gymnasium.wrappers ('ClipReward') or 'package.module:Class', each with arguments where it takes "
    "some ('ClipReward(min_reward=-1, max_reward=1)'), or from Python a class or callable that takes an environment"
)


def split_wrappers(text: str) -> list[str]:
    """Split ``"A,B(x=1, y=2)"`` at the commas outside of brackets and quotes.

    Example:
        >>> split_wrappers("FlattenObservation, TransformReward(func=abs)")
        ['FlattenObservation', 'TransformReward(func=abs)']
    """
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def resolve_wrapper(wrapper: object) -> Wrapper:
    """Return the callable that wraps an environment.

    Args:
        wrapper: A callable that takes an environment; or text: the name of a wrapper in ``gymnasium.wrappers``, or
            ``"package.module:Class"``, each optionally with arguments: ``"TimeLimit(max_episode_steps=200)"``.

    Raises:
        ConfigurationError: It is neither, there is no such wrapper, or its arguments are not literals.
    """
    if callable(wrapper):
        return wrapper
    if not isinstance(wrapper, str):
        raise ConfigurationError(f"config.wrappers: expected {_FORMS}; got {wrapper!r}.")
    name, bracket, _ = wrapper.partition("(")
    found = _named(name.strip())
    if not bracket:
        return found
    try:
        call = ast.parse(f"_{wrapper[len(name) :].strip()}", mode="eval").body
        assert isinstance(call, ast.Call)
        positional = [ast.literal_eval(argument) for argument in call.args]
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        assert "None" not in named  # ** has no name
    except (SyntaxError, ValueError, AssertionError) as error:
        raise ConfigurationError(
            f"config.wrappers: cannot read the arguments of {wrapper!r}: expected numbers, texts, True, False, None, "
            "lists or dicts, e.g. 'TimeLimit(max_episode_steps=200)'. A function as argument needs a callable of your "
            "module: 'package.module:my_wrapper'."
        ) from error
    return lambda env: found(env, *positional, **named)


def wrap_env(env: Any, wrappers: Sequence[object]) -> Any:
    """Wrap an environment, the first wrapper innermost; close it if a wrapper fails.

    Raises:
        ConfigurationError: A wrapper is unknown, does not fit the environment, or does not return an environment.
    """
    for wrapper in wrappers:
        try:
            wrapped = resolve_wrapper(wrapper)(env)
        except ConfigurationError:
            env.close()
            raise
        except Exception as error:
            env.close()
            hint = extra_hint(error)
            raise ConfigurationError(
                f"config.wrappers: {_shown(wrapper)} cannot wrap {env}: {type(error).__name__}: {error}.{hint}"
            ) from error
        if not hasattr(wrapped, "step"):
            env.close()
            raise ConfigurationError(
                f"config.wrappers: {_shown(wrapper)} returned {wrapped!r}; expected the wrapped environment."
            )
        env = wrapped
    return env


def wrap_atari(env: object) -> Any:
    """Return an Atari env with the standard preprocessing, as applied by ``is_atari=True``.

    Up to 30 no-ops after a reset; every 4th frame (the maximum over the last two), in grey, 84×84; the newest 4 frames
    stacked: observations ``[4, 84, 84]``, uint8 (Machado et al. 2018, arXiv:1709.06009). Lost lives do not end
    episodes, and rewards are not changed.
    """
    return wrap_env(env, ["AtariPreprocessing", "FrameStackObservation(stack_size=4)"])


def _named(name: str) -> Wrapper:
    """Return the wrapper of that name; ``package.module:Class`` imports the module."""
    if ":" not in name:
        found = getattr(gym.wrappers, name, None) if name in gym.wrappers.__all__ else None
        if not callable(found):
            raise ConfigurationError(
                f"config.wrappers: gymnasium.wrappers has no wrapper {name!r}."
                f"{did_you_mean(name, gym.wrappers.__all__)} Expected {_FORMS}."
            )
        return found  # type: ignore[no-any-return]
    try:
        target = find_code(name, CALLER)
    except ConfigurationError as error:
        raise ConfigurationError(f"config.wrappers: {error}{extra_hint(error)}") from error
    if not callable(target):
        raise ConfigurationError(f"config.wrappers: {name!r} is no class or callable.")
    return target  # type: ignore[no-any-return]


def _shown(wrapper: object) -> str:
    return repr(wrapper) if isinstance(wrapper, str) else str(getattr(wrapper, "__qualname__", wrapper))
