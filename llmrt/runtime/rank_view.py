"""What an owner knows of its ranks and of its calls to them. Data; `supervisor` fills it."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmrt.errors import RankFailure
from llmrt.messages import Stopped
from llmrt.runtime.channel import Channel
from llmrt.runtime.events import RankExited, Stream


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOutput:
    """Whole lines that a worker wrote."""

    rank: int | None
    """None for the guard."""
    stream: Stream
    text: str
    num_dropped_lines: int = 0
    """Lines before these that were thrown away because they came too fast."""


@dataclass(kw_only=True)
class PendingCall:
    """A command on its way; `WorkerGroup.wait` returns its answers."""

    id: int
    ranks: tuple[int, ...]
    command: str
    """What was asked, in a word, for messages."""
    replies: dict[int, object] = field(default_factory=dict[int, object])
    failures: list[RankFailure] = field(default_factory=list[RankFailure])

    @property
    def is_done(self) -> bool:
        """Whether every rank has answered."""
        return len(self.replies) == len(self.ranks)

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have not answered, neither well nor badly."""
        failed = {failure.rank for failure in self.failures}
        return tuple(r for r in self.ranks if r not in self.replies and r not in failed)


@dataclass(kw_only=True)
class RankView:
    """What is known of one rank."""

    rank: int
    channel: Channel
    pid: int = 0
    host: str = ""
    """Where it runs, if not on the launcher's host."""
    phase: str = "waiting for the guard"
    is_ready: bool = False
    """Whether its worker exists and answers calls."""
    proved_threads: bool = False
    last_command: str = ""
    stopped: Stopped | None = None
    doom: str = ""
    """Why it is about to end or has ended, where somebody above its guard knows."""
    exited: RankExited | None = None
    closed_at: float | None = None
    """When its channel came to its end, while nobody said that it ended."""
    is_hung: bool = False
    owes_output: bool = False
    """Whether lines that it printed may still be on their way."""
    state: str = ""
    stacks: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether its process exists, as far as anybody said."""
        return self.pid != 0 and self.exited is None
