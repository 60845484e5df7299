"""Reading a model's config.json: every value is checked where it is taken, and a wrong one is named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from mlserve.errors import UnsupportedModelError

__all__ = ["Settings", "wrong_setting"]

MAX_SIZE = 2**31 - 1

T = TypeVar("T")


class Settings:
    """The settings of a model. A value of null counts as absent, and an absent one has its default or is refused."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        """`defaults` stand for keys that are absent; a key that is there with null is not among those."""
        self._values = {**(defaults or {}), **values}

    def get(self, key: str) -> Any:
        """The value as it is, or None."""
        return self._values.get(key)

    def size(self, key: str, default: int | None = None, limit: int = MAX_SIZE) -> int:
        """A whole number from 1 to `limit`."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            raise wrong_setting(key, value, f"a whole number from 1 to {limit}")
        return value

    def optional_size(self, key: str) -> int | None:
        """A whole number from 1 to `MAX_SIZE`, or None."""
        return None if self.get(key) is None else self.size(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise wrong_setting(key, value, "a number above 0")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A finite number above 0, or None."""
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise wrong_setting(key, value, "true or false")
        return value

    def choice(self, key: str, choices: Mapping[str, T]) -> T:
        """What one of the names in `choices` stands for."""
        value = self.get(key)
        if not isinstance(value, str) or value not in choices:
            raise wrong_setting(key, value, f"one of {', '.join(choices)}")
        return choices[value]

    def numbers(self, key: str, length: int) -> list[float]:
        """A list of `length` finite numbers above 0."""
        values = self._value(key, None)
        if not isinstance(values, list) or len(values) != length:
            raise wrong_setting(key, values, f"a list of {length} numbers")
        return [Settings({key: value}).number(key) for value in values]

    def section(self, key: str) -> dict[str, Any]:
        """A nested object; empty if it is absent."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise wrong_setting(key, value, "an object")
        return dict(value)

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key)
        return default if value is None else value


def wrong_setting(key: str, value: object, want: str) -> UnsupportedModelError:
    """The error for a setting that has no sensible value."""
    if value is None:
        return UnsupportedModelError(f"the model's config has no {key}: it must give {want}")
    return UnsupportedModelError(f"the model's config gives {key} as {value!r}: it must be {want}")
