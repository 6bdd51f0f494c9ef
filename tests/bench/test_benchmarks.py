"""The programs in `benchmarks/`, each run once in small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def lines_of(module: str, *arguments: str) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("waiting", ["0", "50"])
def test_the_control_plane_is_not_measured(waiting: str) -> None:
    lines = lines_of("control_plane", "--tp", "2", "--sequences", "1,20", "--waiting", waiting)
    assert [(line["tp"], line["sequences"]) for line in lines] == [(2, 1), (2, 20)]
    assert all(0 < float(str(line["best_us"])) <= float(str(line["median_us"])) for line in lines)


@pytest.mark.slow
def test_a_life_is_not_measured(tiny_model: Path) -> None:
    lines = lines_of("lifecycle", str(tiny_model), "--tp", "1", "--repeat", "1")
    assert [line["start_method"] for line in lines] == ["spawn", "fork"]
    assert all(0 < float(str(x["open_s"])) < float(str(x["first_token_s"])) for x in lines)


def test_two_systems_are_not_run_in_turn(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = tmp_path / "peer.py"
    script.write_text(
        "import json, sys\n"
        f"open({str(log)!r}, 'a').write(sys.argv[1])\n"
        "print('noise')\n"
        "print(json.dumps({'workload': 'w', 'best_s': 0.1, 'median_s': float(sys.argv[2])}))\n"
        "print(json.dumps({'workload': sys.argv[1], 'close_s': 1.0}))\n"
    )
    command = f"{sys.executable} {script}"
    (line,) = lines_of(
        "compare", "--rounds", "2", "--a", f"{command} A 0.5", "--b", f"{command} B 1.5"
    )
    assert log.read_text() == "ABAB"
    assert line == {"workload": "w", "a_s": 0.5, "b_s": 1.5, "ratio": 3.0, "rounds": 2}
