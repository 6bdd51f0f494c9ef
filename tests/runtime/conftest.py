from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from llmrt.config import Timeouts
from llmrt.runtime.fork_history import ForkHistory
from llmrt.runtime.launchers.base import GroupSpec, Launcher
from llmrt.runtime.launchers.mp import MpLauncher
from llmrt.runtime.rank_view import WorkerOutput
from llmrt.runtime.start_method import StartMethod
from llmrt.runtime.worker_group import WorkerGroup
from tests.support.fake_workers import FakeConfig

ENTRY = "tests.support.fake_workers:FakeWorker"
QUICK = Timeouts(start_progress=20.0, step=20.0, close=8.0, close_ask=0.5, close_terminate=0.3)


@dataclass
class Heard:
    """What a group told its callbacks."""

    output: list[WorkerOutput] = field(default_factory=list)
    phases: list[tuple[int | None, str, str]] = field(default_factory=list)

    def on_phase(self, rank: int | None, phase: str, detail: str) -> None:
        self.phases.append((rank, phase, detail))

    def text(self, stream: str, rank: int | None = 0) -> str:
        return "".join(o.text for o in self.output if (o.stream, o.rank) == (stream, rank))


class HeardGroup(WorkerGroup):
    """A group that keeps what it heard."""

    heard: Heard


MakeGroup = Callable[..., HeardGroup]


def new_group(
    *,
    num_ranks: int = 2,
    method: str = "spawn",
    launcher: Launcher | None = None,
    timeouts: Timeouts = QUICK,
    config: FakeConfig | None = None,
    **spec: Any,
) -> HeardGroup:
    heard = Heard()
    spec.setdefault("entry", ENTRY)
    spec.setdefault("preload", ("tests.support.fake_workers",))
    spec.setdefault("configs", (config or FakeConfig(),) * num_ranks)
    group = HeardGroup(
        GroupSpec(start_method=StartMethod(name=method, reason="the test asks for it"), **spec),
        launcher or MpLauncher(ForkHistory()),
        timeouts,
        on_output=heard.output.append,
        on_phase=heard.on_phase,
    )
    group.heard = heard
    return group


@pytest.fixture
def make_group() -> Iterator[MakeGroup]:
    """Make groups that are closed when the test is over, whatever it did."""
    with ExitStack() as stack:

        def make(**options: Any) -> HeardGroup:
            group = new_group(**options)
            stack.callback(group.close)
            return group

        yield make


@pytest.fixture(params=["spawn", "fork"])
def start_group(request: pytest.FixtureRequest, make_group: MakeGroup) -> MakeGroup:
    """Make and start groups, by either start method."""

    def start(**options: Any) -> HeardGroup:
        group = make_group(method=request.param, **options)
        group.start()
        return group

    return start
