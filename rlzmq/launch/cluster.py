"""TOML files whose tables are classes: the cluster file, and RUN/jobs/roles.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.suggest import did_you_mean

__all__ = ["Table"]


class Table(BaseModel):
    """A table of a TOML file whose keys are the fields of the class."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a file.

        Raises:
            ConfigurationError: The file is missing or not TOML, or a key is unknown, missing or wrong.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"cannot read {path}: {error}") from error
        return cls.parse(text, source=str(path))

    @classmethod
    def parse(cls, text: str, *, source: str = "cluster file") -> Self:
        """Parse the text of a file; raises as `read` does."""
        try:
            return cls.model_validate(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(f"{source} is not valid TOML: {error}") from error
        except ValidationError as error:
            problem = error.errors()[0]
            *place, key = problem["loc"] or ("",)
            where = ": ".join([source, *map(str, place)])
            if problem["type"] == "extra_forbidden":
                nested = (name for kind in Table.__subclasses__() for name in kind.model_fields)
                known = nested if place else cls.model_fields
                raise ConfigurationError(
                    f"{where}: unknown key {key!r}.{did_you_mean(str(key), known)}"
                ) from None
            if problem["type"] == "missing":
                raise ConfigurationError(f"{where}: {key} is missing") from None
            raise ConfigurationError(f"{where}: {key}: {problem['msg']}, got {problem['input']!r}") from None
