"""The stop ladder: ask, SIGTERM, SIGKILL, then the launcher itself. One deadline for all.

`plan` is a pure function of what is observed; whoever drives it does what it says, waits as long as
it says, and asks again, until it says that everything is over.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmrt.config import Timeouts

_BROKEN_ASK_SECONDS = 0.3
_KILL_GRACE_SECONDS = 1.0
_LAUNCHER_GRACE_SECONDS = 0.2
_GIVE_UP_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """When each rung is reached, in seconds from the start of the teardown."""

    terminate_at: float
    kill_at: float
    kill_launcher_at: float
    give_up_at: float
    launcher_patience: float
    """How long the launcher has to end by itself when it has nothing left but itself."""

    @classmethod
    def of(cls, timeouts: Timeouts, total: float, *, is_broken: bool) -> Limits:
        """Share out `total` seconds; a group with a dead or stuck rank is asked only briefly."""
        ask = min(timeouts.close_ask, total * 0.4)
        if is_broken:
            ask = min(ask, _BROKEN_ASK_SECONDS)
        kill_at = ask + min(timeouts.close_terminate, total * 0.2)
        grace_ends_at = min(kill_at + _KILL_GRACE_SECONDS, max(total, _KILL_GRACE_SECONDS))
        kill_launcher_at = max(total * 0.8, grace_ends_at)
        return cls(
            terminate_at=ask,
            kill_at=kill_at,
            kill_launcher_at=kill_launcher_at,
            give_up_at=max(total, kill_launcher_at) + _GIVE_UP_SECONDS,
            launcher_patience=max(total, _LAUNCHER_GRACE_SECONDS),
        )

    def hurried(self, elapsed: float) -> Limits:
        """Return limits whose deadline is now."""
        kill_launcher_at = min(self.kill_launcher_at, elapsed + _KILL_GRACE_SECONDS)
        return Limits(
            terminate_at=min(self.terminate_at, elapsed),
            kill_at=min(self.kill_at, elapsed),
            kill_launcher_at=kill_launcher_at,
            give_up_at=kill_launcher_at + _GIVE_UP_SECONDS,
            launcher_patience=_LAUNCHER_GRACE_SECONDS,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankObserved:
    """One rank that has not ended, as the ladder sees it."""

    rank: int
    can_be_asked: bool
    """False where it is known not to listen, or it was never up."""
    is_asked: bool = False
    terminated_at: float | None = None
    is_killed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """Everything the ladder decides on."""

    elapsed: float
    living: tuple[RankObserved, ...]
    launcher_is_gone: bool
    launcher_told_at: float | None = None
    launcher_is_killed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Send `Stop` to these ranks."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Terminate:
    """Send SIGTERM to these ranks."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """Send SIGKILL to these ranks."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EndLauncher:
    """Tell the launcher's own process to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KillLauncher:
    """SIGKILL the launcher's own process, and with it whatever hangs on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """There is nothing to do until something happens, or until this many seconds have passed."""

    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Over:
    """Everything has ended, or nothing more can be done."""


Step = Ask | Terminate | Kill | EndLauncher | KillLauncher | Wait | Over


def plan(seen: Observed, limits: Limits) -> Step:
    """Return the next step down."""
    if seen.launcher_is_gone or seen.elapsed >= limits.give_up_at:
        return Over()
    if not seen.launcher_is_killed and seen.elapsed >= limits.kill_launcher_at:
        return KillLauncher()
    if seen.living:
        return _plan_ranks(seen, limits)
    if seen.launcher_told_at is None:
        return EndLauncher()
    # It may be deaf, in the middle of its imports.
    due_at = seen.launcher_told_at + limits.launcher_patience
    if not seen.launcher_is_killed and seen.elapsed >= due_at:
        return KillLauncher()
    return _wait(seen, due_at, limits.kill_launcher_at, limits.give_up_at)


def _plan_ranks(seen: Observed, limits: Limits) -> Step:
    elapsed = seen.elapsed
    # A rank that cannot be asked is terminated while the others are being asked.
    to_kill = tuple(r.rank for r in seen.living if not r.is_killed and _is_due(r, seen, limits))
    if to_kill:
        return Kill(ranks=to_kill)
    to_terminate = tuple(
        r.rank
        for r in seen.living
        if r.terminated_at is None
        and (elapsed >= limits.terminate_at or not (r.can_be_asked or r.is_asked))
    )
    if to_terminate:
        return Terminate(ranks=to_terminate)
    to_ask = tuple(
        r.rank for r in seen.living if r.can_be_asked and not r.is_asked and r.terminated_at is None
    )
    if to_ask:
        return Ask(ranks=to_ask)
    terminated = [r.terminated_at for r in seen.living if r.terminated_at is not None]
    patience = limits.kill_at - limits.terminate_at
    return _wait(
        seen,
        limits.terminate_at,
        limits.kill_at,
        limits.kill_launcher_at,
        limits.give_up_at,
        *(at + patience for at in terminated),
    )


def _is_due(rank: RankObserved, seen: Observed, limits: Limits) -> bool:
    """Return whether a rank has had its time to follow SIGTERM."""
    if seen.elapsed >= limits.kill_at:
        return True
    patience = limits.kill_at - limits.terminate_at
    return rank.terminated_at is not None and seen.elapsed >= rank.terminated_at + patience


def _wait(seen: Observed, *moments: float) -> Wait:
    return Wait(seconds=min(at for at in moments if at > seen.elapsed) - seen.elapsed)
