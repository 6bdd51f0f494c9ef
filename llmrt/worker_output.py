"""Where the lines go that workers print: the `llmrt.worker` logger, never the user's stdout."""

from __future__ import annotations

import contextlib
import logging
import sys

from llmrt.runtime.worker_group import WorkerOutput


def forward_output(output: WorkerOutput) -> None:
    """Log what a worker printed; where nobody configured logging, show it on stderr."""
    logger = logging.getLogger("llmrt.worker")
    for line in output.lines:
        if logger.hasHandlers():
            logger.info("rank %d: %s", output.rank, line, extra={"rank": output.rank})
        else:
            _show(f"[llmrt rank {output.rank}] {line}\n")


def _show(text: str) -> None:
    with contextlib.suppress(Exception):  # a closed or strange stderr is not the engine's affair
        sys.stderr.write(text)
        sys.stderr.flush()
