from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrt.config import Timeouts
from llmrt.runtime.teardown import (
    Ask,
    EndLauncher,
    Kill,
    KillLauncher,
    Limits,
    Observed,
    Over,
    RankObserved,
    Terminate,
    Wait,
    plan,
)

TIMEOUTS = Timeouts(close=10.0, close_ask=3.0, close_terminate=1.0)


@dataclass
class Simulation:
    """Ranks that end at a given rung, a launcher that ends when told or only when killed."""

    ends_by: list[str]
    launcher_listens: bool = True
    can_be_asked: bool = True
    total: float = 10.0
    is_broken: bool = False
    now: float = 0.0
    launcher_is_gone: bool = False
    told_at: float | None = None
    killed: bool = False
    log: list[str] = field(default_factory=list)
    ended: dict[int, float] = field(default_factory=dict)

    def run(self) -> Simulation:
        limits = Limits.of(TIMEOUTS, self.total, is_broken=self.is_broken)
        ranks = [
            RankObserved(rank=rank, can_be_asked=self.can_be_asked)
            for rank in range(len(self.ends_by))
        ]
        for _ in range(100):
            living = tuple(r for r in ranks if r.rank not in self.ended)
            seen = Observed(
                elapsed=self.now,
                living=() if self.launcher_is_gone else living,
                launcher_is_gone=self.launcher_is_gone,
                launcher_told_at=self.told_at,
                launcher_is_killed=self.killed,
            )
            step = plan(seen, limits)
            match step:
                case Over():
                    return self
                case Wait(seconds=seconds):
                    assert seconds > 0
                    self.now += seconds
                case Ask(ranks=which):
                    ranks = [replace(r, is_asked=r.is_asked or r.rank in which) for r in ranks]
                    self._reach("asked", which)
                case Terminate(ranks=which):
                    ranks = [
                        replace(r, terminated_at=self.now) if r.rank in which else r for r in ranks
                    ]
                    self._reach("SIGTERM", which)
                case Kill(ranks=which):
                    ranks = [replace(r, is_killed=r.is_killed or r.rank in which) for r in ranks]
                    self._reach("SIGKILL", which)
                case EndLauncher():
                    self.told_at = self.now
                    self.log.append("end launcher")
                    self.launcher_is_gone = self.launcher_listens
                case KillLauncher():
                    self.killed = self.launcher_is_gone = True
                    self.log.append("kill launcher")
        raise AssertionError(f"never over: {self.log}")

    def _reach(self, rung: str, ranks: tuple[int, ...]) -> None:
        self.log.append(f"{rung} {','.join(map(str, ranks))}")
        for rank in ranks:
            if self.ends_by[rank] == rung and self.launcher_listens:
                self.ended[rank] = self.now


def test_willing_ranks_are_asked_once_and_nothing_is_waited_for() -> None:
    done = Simulation(["asked", "asked"]).run()
    assert done.log == ["asked 0,1", "end launcher"]
    assert done.now == 0


def test_each_rank_goes_only_as_far_down_as_it_must() -> None:
    done = Simulation(["asked", "SIGTERM", "SIGKILL"]).run()
    assert done.log == ["asked 0,1,2", "SIGTERM 1,2", "SIGKILL 2", "end launcher"]
    assert done.ended == {0: 0, 1: 3.0, 2: 4.0}


def test_ranks_that_cannot_be_asked_are_terminated_at_once() -> None:
    done = Simulation(["SIGTERM", "SIGKILL"], can_be_asked=False).run()
    assert done.log == ["SIGTERM 0,1", "SIGKILL 1", "end launcher"]
    assert done.ended == {0: 0, 1: 1.0}


def test_a_broken_group_is_asked_only_briefly() -> None:
    done = Simulation(["SIGKILL"], is_broken=True).run()
    assert done.ended[0] == pytest.approx(1.3)


def test_no_time_means_sigkill_at_once() -> None:
    done = Simulation(["SIGKILL"], total=0.0).run()
    assert done.log == ["SIGKILL 0", "end launcher"]
    assert done.now == 0


def test_a_launcher_that_does_not_listen_is_killed_before_the_deadline() -> None:
    done = Simulation(["asked"], launcher_listens=False).run()
    assert done.log == ["asked 0", "SIGTERM 0", "SIGKILL 0", "kill launcher"]
    assert done.now < 10


@given(
    ends_by=st.lists(st.sampled_from(["asked", "SIGTERM", "SIGKILL"]), max_size=5),
    total=st.floats(0, 100),
    listens=st.booleans(),
    asked=st.booleans(),
    broken=st.booleans(),
)
def test_every_ladder_ends_within_its_deadline(
    ends_by: list[str], total: float, listens: bool, asked: bool, broken: bool
) -> None:
    done = Simulation(
        ends_by, launcher_listens=listens, can_be_asked=asked, total=total, is_broken=broken
    ).run()
    assert done.launcher_is_gone
    assert done.now <= max(total, 1.0) + 1e-6


@given(elapsed=st.floats(0, 20), total=st.floats(0, 20))
def test_hurrying_never_puts_anything_off(elapsed: float, total: float) -> None:
    limits = Limits.of(TIMEOUTS, total, is_broken=False)
    hurried = limits.hurried(elapsed)
    assert hurried.kill_at <= limits.kill_at
    assert hurried.kill_at <= elapsed
    assert hurried.kill_launcher_at <= max(limits.kill_launcher_at, elapsed + 1.0)


def test_a_launcher_that_is_deaf_and_alone_is_not_waited_for_by_somebody_in_a_hurry() -> None:
    simulation = Simulation(ends_by=[], launcher_listens=False, total=0.0).run()
    assert simulation.log == ["end launcher", "kill launcher"]
    assert simulation.now < 0.5


def test_what_cannot_be_killed_is_given_up_in_the_end() -> None:
    limits = Limits.of(TIMEOUTS, 1.0, is_broken=False)
    stuck = RankObserved(
        rank=0, can_be_asked=True, is_asked=True, terminated_at=0.4, is_killed=True
    )
    seen = Observed(
        elapsed=limits.give_up_at,
        living=(stuck,),
        launcher_is_gone=False,
        launcher_told_at=0.0,
        launcher_is_killed=True,
    )
    assert plan(seen, limits) == Over()
