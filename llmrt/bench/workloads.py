"""The workloads: how many requests, of how many prompt tokens, for how many output tokens.

Prompts are token ids made by a formula, so every system that is compared runs the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from llmrt.errors import ConfigError

_NUM_IDS = 40_000
_FIRST_ID = 100
"""Ids from here on are ordinary tokens in the vocabularies that are compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests that are handed in together."""

    name: str
    requests: tuple[tuple[int, int, int], ...]
    """(count, prompt tokens, output tokens) each."""
    shared_prefix: int = 0
    """So many first tokens are the same in every prompt."""

    def prompts(self, salt: int) -> list[tuple[list[int], int]]:
        """Return each request's prompt and number of output tokens.

        Args:
            salt: Prompts of different salts have no prefix in common.
        """
        head = [_token(salt * 15_485_863 + j * 104_729) for j in range(self.shared_prefix)]
        sizes = [(p, o) for count, p, o in self.requests for _ in range(count)]
        return [
            (head + _tail(salt, index, num_prompt - self.shared_prefix), num_output)
            for index, (num_prompt, num_output) in enumerate(sizes)
        ]


def read_workloads() -> Mapping[str, Workload]:
    """Return the workloads by name, in the order of the table."""
    text = (files("llmrt.bench") / "workloads.json").read_text()
    table: dict[str, dict[str, Any]] = json.loads(text)
    return {name: _workload(name, entry) for name, entry in table.items()}


def select_workloads(names: Sequence[str]) -> list[Workload]:
    """Return the workloads of these names; all of them where none is named.

    Raises:
        ConfigError: there is no workload of a name.
    """
    known = read_workloads()
    for name in names:
        if name not in known:
            raise ConfigError(f"There is no workload {name!r}; there are {', '.join(known)}.")
    return [known[name] for name in names or known]


def _workload(name: str, entry: Mapping[str, Any]) -> Workload:
    requests = tuple((int(c), int(p), int(o)) for c, p, o in entry["requests"])
    return Workload(name=name, requests=requests, shared_prefix=entry.get("shared_prefix", 0))


def _tail(salt: int, index: int, length: int) -> list[int]:
    first = salt * 32_452_843 + index * 7_919 + 1
    return [_token(first + j * 104_729) for j in range(length)]


def _token(number: int) -> int:
    return number % _NUM_IDS + _FIRST_ID
