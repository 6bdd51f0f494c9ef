"""Programs that are not quite what Python made: frozen, or with strange files or models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from llmrt import Engine
from tests.hosts.workplace import BEGINNING, Workplace

METHODS = pytest.mark.parametrize("method", ["spawn", "fork"])
FROZEN = """
sys.frozen = True
sys.executable = os.path.abspath("application")
with Engine(MODEL, tp=2, progress=False, start_method={method!r}) as llm:
    facts = use(llm, lambda worker: [worker.rank, TYPED_HERE])
finish(facts)
"""
APPLICATION = '#!/bin/sh\necho "$@" >> started\n'


@METHODS
@pytest.mark.slow
def test_a_frozen_application_is_never_started_again(method: str, workplace: Workplace) -> None:
    workplace.write("application", APPLICATION).chmod(0o755)
    workplace.write("program.py", BEGINNING + FROZEN.format(method=method))
    workplace.run("program.py")
    workplace.assert_worked(method, f"start_method='{method}' was given")
    assert not (workplace.directory / "started").exists()


STRANGE_FILES = """
import io

class NoFileno(io.StringIO):
    def fileno(self):
        raise io.UnsupportedOperation("fileno")

class OnlyWrites:
    def __init__(self): self.text = ""
    def write(self, text): self.text += text
    def flush(self): pass
    def getvalue(self): return self.text

for file_class in (NoFileno, OnlyWrites):
    sys.stdout, sys.stderr = file_class(), file_class()
    with Engine(MODEL, tp=2, start_method={method!r}, progress=True) as llm:
        facts = use(llm, lambda worker: [worker.rank, TYPED_HERE])
        llm.collective_rpc(lambda worker: print("hello from", worker.rank))
    shown = sys.stderr.getvalue()
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    assert "llmrt: " in shown, shown
    for rank in (0, 1):
        assert f"[llmrt rank {{rank}}] hello from {{rank}}\\n" in shown, shown
    finish(facts)
"""


@METHODS
@pytest.mark.slow
def test_standard_files_that_are_no_files(method: str, workplace: Workplace) -> None:
    workplace.write("program.py", BEGINNING + STRANGE_FILES.format(method=method))
    workplace.run("program.py")
    workplace.assert_worked(method, f"start_method='{method}' was given", times=2)


@METHODS
def test_a_model_with_a_config_class_of_its_own(
    method: str, tiny_model: Path, tmp_path: Path, tokens: list[int]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_own.OwnConfig"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "configuration_own.py").write_text("raise AssertionError('imported')\n")
    with Engine(model, tp=2, start_method=method) as llm:  # type: ignore[arg-type]
        output = llm.generate("a")[0]
        assert len(output.token_ids) > 0
