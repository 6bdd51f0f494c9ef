"""`llmrt bench`: the same work for every system, and honest lines about it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import peers
from llmrt.bench.workloads import Workload, read_workloads, select_workloads
from llmrt.cli import main
from llmrt.errors import ConfigError
from llmrt.sampling import SamplingParams


class FakeEngine:
    """Answers every prompt with as many tokens as asked for, and remembers what it was asked."""

    def __init__(self, model: str | None, **options: Any) -> None:
        self.model = model
        self.options = options
        self.prompts: list[list[list[int]]] = []
        self.num_closed = 0

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.num_closed += 1

    def generate(self, prompts: list[list[int]], params: Sequence[SamplingParams]) -> list[Any]:
        assert all(p.is_greedy and p.ignore_eos for p in params)
        self.prompts.append(prompts)
        return [SimpleNamespace(token_ids=[0] * (p.max_tokens or 0)) for p in params]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[FakeEngine, list[str]]:
    made: list[FakeEngine] = []

    def open_engine(model: str | None, **options: Any) -> Any:
        made.append(FakeEngine(model, **options))
        return made[-1]

    assert main(["bench", *arguments], engine=open_engine) == 0
    return made[0], capsys.readouterr().out.splitlines()


def test_the_prompts_change_from_one_version_to_the_next() -> None:
    (prompt, num_output), *_ = read_workloads()["decode_b1"].prompts(salt=3)
    assert num_output == 128
    assert len(prompt) == 16
    assert prompt[:3] == [(3 * 32_452_843 + j * 104_729 + 1) % 40_000 + 100 for j in range(3)]


@pytest.mark.parametrize("name", read_workloads())
def test_the_other_systems_are_given_other_prompts(name: str) -> None:
    spec = json.loads(peers.TABLE.read_text())[name]
    prompts, outputs = peers.prompts_of(spec, salt=3)
    assert list(zip(prompts, outputs, strict=True)) == read_workloads()[name].prompts(salt=3)


def test_prompts_of_one_salt_share_exactly_their_prefix() -> None:
    workload = Workload(name="w", requests=((2, 8, 1),), shared_prefix=5)
    (first, _), (second, _) = workload.prompts(salt=1)
    assert first[:5] == second[:5]
    assert first[5:] != second[5:]
    assert workload.prompts(salt=2)[0][0][:5] != first[:5]


def test_an_unknown_workload_is_passed_over() -> None:
    with pytest.raises(ConfigError, match=r"no workload 'decode'; there are decode_b1, "):
        select_workloads(["decode"])
    assert main(["bench", "--workloads", "decode"], engine=FakeEngine) == 2  # type: ignore[arg-type]


def test_a_line_of_json_for_start_workloads_and_close(capsys: pytest.CaptureFixture[str]) -> None:
    engine, lines = run(
        capsys, "m", "--workloads", "decode_b8,prefill", "--repeat", "2", "--json", "--tp", "2"
    )
    start, decode, prefill, close = map(json.loads, lines)
    assert start.keys() == {"system", "tp", "workload", "ready_s", "first_token_s"}
    assert [line["workload"] for line in (decode, prefill)] == ["decode_b8", "prefill"]
    assert decode.keys() == {
        "system", "tp", "workload", "best_s", "median_s", "out_tok_s", "total_tok_s"
    }  # fmt: skip
    assert decode["total_tok_s"] == pytest.approx(2 * decode["out_tok_s"], rel=1e-3)
    assert close.keys() == {"system", "tp", "workload", "close_s"}
    assert (engine.model, engine.options["tp"]) == ("m", 2)
    assert engine.num_closed >= 1


def test_a_repeat_finds_its_prompts_in_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    engine, lines = run(capsys, "--workloads", "decode_b1", "--repeat", "3")
    _warm_up, *runs = engine.prompts
    assert len(runs) == 4
    assert len({tuple(prompts[0]) for prompts in runs}) == 4
    assert lines[1].startswith("decode_b1 ")


@pytest.mark.parametrize("arguments", [["--repeat", "0"], ["--threads", "-1"], ["--repeat", "x"]])
def test_a_count_below_one_is_taken(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", *arguments], engine=FakeEngine)  # type: ignore[arg-type]
    assert exit_info.value.code == 2
