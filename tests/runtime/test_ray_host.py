"""What `observe` sees of the real Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import ray
from llmrt.runtime.environment import choose_start_method
from llmrt.runtime.observe import observe

assert observe().ray is None, "only imported"
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
assert observe().ray == "driver", observe()

@ray.remote
def look():
    seen = observe()
    return seen.ray, choose_start_method(seen).reason

kind, reason = ray.get(look.remote())
assert kind == "worker", kind
assert "Ray worker" in reason, reason
ray.shutdown()
assert observe().ray is None, "shut down"
"""


@pytest.mark.ray
@pytest.mark.slow
def test_ray_counts_only_while_it_is_initialised() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
