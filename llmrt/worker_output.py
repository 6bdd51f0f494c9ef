"""Where the lines go that workers print: the `llmrt.worker` logger, never the user's stdout."""

from __future__ import annotations

import contextlib
import logging
import sys

from llmrt.runtime.supervisor import WorkerOutput


def forward_output(output: WorkerOutput) -> None:
    """Log what a worker printed; where nobody configured logging, show it on stderr."""
    logger = logging.getLogger("llmrt.worker")
    who = "guard" if output.rank is None else f"rank {output.rank}"
    lines = output.text.splitlines()
    if output.num_dropped_lines:
        lines.insert(0, f"({output.num_dropped_lines} lines were dropped: they came too fast)")
    with contextlib.suppress(Exception):  # a handler that raises, a closed stderr: not our affair
        if logger.hasHandlers():
            for line in lines:
                logger.info("%s: %s", who, line, extra={"rank": output.rank})
        else:
            _show("".join(f"[llmrt {who}] {line}\n" for line in lines))


def _show(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
