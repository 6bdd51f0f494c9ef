"""Where workers run when nobody said, and what is refused. On a Ray: tests/ray."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from llmrt.backend_choice import choose_backend
from llmrt.config import EngineConfig
from llmrt.errors import ConfigError
from llmrt.ray import PLACEMENT_GROUP_VARIABLE, placement_group_from_env
from llmrt.runtime.environment import Environment, Host

SCRIPT = Environment(host=Host.SCRIPT, platform="linux", machine="x86_64")


def test_without_ray_auto_is_mp_and_says_why() -> None:
    backend = choose_backend(EngineConfig(tp=64), SCRIPT)
    assert (backend.name, backend.reason) == ("mp", "the workers fit on this machine")


def test_a_placement_group_is_only_for_ray() -> None:
    with pytest.raises(ConfigError, match='placement_group= is for backend="ray"'):
        choose_backend(EngineConfig(backend="mp", placement_group=object()), SCRIPT)


def test_a_launcher_is_taken_as_it_is() -> None:
    launcher = SimpleNamespace(name="mine")
    assert choose_backend(EngineConfig(backend=launcher), SCRIPT).launcher is launcher


def test_no_variable_names_no_group() -> None:
    assert placement_group_from_env({}) is None
    assert placement_group_from_env({PLACEMENT_GROUP_VARIABLE: ""}) is None


def test_mp_and_the_import_of_the_public_names_never_import_ray() -> None:
    program = (
        "import sys, llmrt.ray, llmrt.engine, llmrt.backend_choice as b\n"
        "from llmrt.config import EngineConfig\n"
        "from llmrt.runtime.observe import observe\n"
        "for name in ('mp', 'auto'):\n"
        "    b.choose_backend(EngineConfig(backend=name), observe())\n"
        "print([m for m in sys.modules if m.partition('.')[0] == 'ray'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
