"""Typed access to the fields of a `config.json`; whatever is not as it must be is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmrt.errors import ConfigError


class ConfigFields:
    """The fields of one `config.json`. A field that is null counts as absent."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def raw(self, field: str) -> Any:
        """Return a field as it stands, None where it is absent."""
        return self._config.get(field)

    def names(self, field: str) -> bool:
        """Return whether the file has the field, be it null."""
        return field in self._config

    def count(self, field: str, default: int | None = None, *, at_least: int = 1) -> int:
        """Return a whole number; without a default the field must be there."""
        value = self._config.get(field)
        if value is None and default is None:
            raise ConfigError(f"config.json has no {field!r}, which the model needs.")
        return as_count(field, default if value is None else value, at_least=at_least)

    def number(self, field: str, default: float) -> float:
        """Return a number above 0."""
        value = self._config.get(field)
        return as_number(field, default if value is None else value)

    def flag(self, field: str, default: bool) -> bool:
        """Return true or false."""
        value = self._config.get(field)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{field}={value!r} in config.json must be true or false.")
        return default if value is None else value

    def choice(self, field: str, default: str, choices: tuple[str, ...]) -> str:
        """Return one of the choices."""
        value = self._config.get(field)
        value = default if value is None else value
        if value not in choices:
            raise ConfigError(
                f"{field}={value!r} in config.json is not supported; llmrt has "
                f"{', '.join(choices)}."
            )
        return value


def as_count(field: str, value: object, *, at_least: int = 1) -> int:
    """Return a value that must be a whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(
            f"{field}={value!r} in config.json must be a whole number of at least {at_least}."
        )
    return value


def as_number(field: str, value: object) -> float:
    """Return a value that must be a number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(f"{field}={value!r} in config.json must be a number above 0.")
    return float(value)
