"""How the guard of an engine is born, and why so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class StartMethod:
    """The way the workers' processes come to be, with the reason in one sentence."""

    name: Literal["fork", "spawn"]
    reason: str
