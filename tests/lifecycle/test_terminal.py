"""Ctrl-C typed at a terminal goes to all of its foreground; only the user's own process sees it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.program import ROOT
from tests.support.terminal import open_terminal

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
from pathlib import Path
from llmrt import Engine, SamplingParams

greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
endless = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)

def saw_sigint(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return any(int(l.split()[1], 16) & 2 for l in lines if l.startswith(("SigPnd", "ShdPnd")))

def generate(llm):
    print("at it", flush=True)
    while True:
        llm.generate(["a"] * 8, endless)

def stream(llm):
    print("at it", flush=True)
    while True:
        for _ in llm.stream("a", endless):
            pass

def collective_rpc(llm):
    print("at it", flush=True)
    llm.collective_rpc(lambda worker: __import__("time").sleep(2))

llm = Engine(sys.argv[1], tp=2, progress=False).open()
expected = llm.generate("b", greedy)[0].token_ids
for verb in (generate, stream, collective_rpc):
    try:
        verb(llm)
    except KeyboardInterrupt:
        print("back", flush=True)
    same = llm.generate("b", greedy)[0].token_ids == expected
    print("same" if same else "other", flush=True)
print("seen" if any(saw_sigint(w.pid) for w in llm.workers) else "unseen", flush=True)
print("at it", flush=True)
llm.generate(["a"] * 64, endless)
sys.stdin.read()
"""


def test_ctrl_c_at_a_terminal_is_the_users_alone(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), str(tiny_model)]
    with open_terminal(command, cwd=ROOT) as terminal:
        for _ in range(3):
            terminal.wait_for("at it")
            terminal.press_ctrl_c()
            terminal.wait_for("back", seconds=1.0)
            terminal.wait_for("same")
        terminal.wait_for("unseen")
        terminal.wait_for("at it")
        terminal.press_ctrl_c()
        assert terminal.wait_for_exit(10) == -2


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_the_block_ends_the_program_as_it_should(
    tiny_model: Path, tmp_path: Path, times: int
) -> None:
    (tmp_path / "program.py").write_text(
        "import sys, llmrt\n"
        "with llmrt.Engine(sys.argv[1], tp=2, progress=False) as llm:\n"
        "    print('inside', flush=True)\n"
        "    while True:\n"
        "        llm.generate('a')\n"
    )
    command = [sys.executable, str(tmp_path / "program.py"), str(tiny_model)]
    with open_terminal(command, cwd=ROOT) as terminal:
        terminal.wait_for("inside")
        for _ in range(times):
            terminal.press_ctrl_c()
        text = terminal.wait_for("KeyboardInterrupt")
        assert "Exception ignored" not in text
        assert terminal.wait_for_exit(10) == -2
