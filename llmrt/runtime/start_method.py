"""StartMethod: how the guard of an engine is born, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class StartMethod:
    """How the guard of an engine is born."""

    name: Literal["fork", "spawn"]
    reason: str
    """Why, in one sentence."""
