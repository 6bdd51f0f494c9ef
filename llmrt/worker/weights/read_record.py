"""ReadRecord: which tensors of a checkpoint have been read; the progress, and what is left over."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from llmrt.config import ReportProgress
from llmrt.errors import ConfigError

DERIVED_SUFFIX = "rotary_emb.inv_freq"
"""Old checkpoints store these frequencies; nobody reads them, for they follow from the config."""

NUM_NAMED = 5
"""So many left-over tensors are named in an error; the rest are counted."""


class ReadRecord:
    """Counts each tensor once, with its full size, whatever part of it this rank reads."""

    def __init__(self, path: Path, sizes: Mapping[str, int], report: ReportProgress) -> None:
        """Store the checkpoint's *path* (for messages) and the bytes of each tensor by name."""
        self._path = path
        self._sizes = sizes
        self._report = report
        self._total = sum(sizes.values())
        self._done = 0
        self._settled: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def require(self, name: str) -> None:
        """Raise ConfigError unless the checkpoint has a tensor of this name."""
        if name in self._sizes:
            return
        near = difflib.get_close_matches(name, self._sizes, n=1)
        hint = f" The nearest name it has is {near[0]!r}." if near else ""
        raise ConfigError(
            f"{self._path} has no tensor {name!r} among its {len(self._sizes)}.{hint} The "
            "checkpoint is incomplete, or its config.json describes another model."
        )

    def mark_read(self, name: str) -> None:
        """Count a tensor as read, and report how far loading is."""
        self.ignore(name)
        self._report("loading weights", self._done, self._total)

    def ignore(self, name: str) -> None:
        """Count a tensor as settled, if the checkpoint has it."""
        if name in self._sizes and name not in self._settled:
            self._settled.add(name)
            self._done += self._sizes[name]

    def check_all_read(self) -> None:
        """Raise ConfigError naming the tensors that are not settled."""
        left_over = [
            name
            for name in self._sizes
            if name not in self._settled and not name.endswith(DERIVED_SUFFIX)
        ]
        if not left_over:
            return
        named = ", ".join(repr(name) for name in left_over[:NUM_NAMED])
        more = len(left_over) - NUM_NAMED
        raise ConfigError(
            f"{self._path} holds {len(left_over)} tensor(s) the model has no place for: {named}"
            + (f" and {more} more" if more > 0 else "")
            + ". Answers without them would be wrong. Its config.json describes another model "
            "(fewer layers, a missing bias flag), or its architecture is not supported."
        )
