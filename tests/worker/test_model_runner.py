"""What the runner keeps between steps, on every rank."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from llmrt.messages import BatchResult, SequenceFailure
from llmrt.sampling import SamplingParams
from llmrt.worker.sequence import SequenceState
from tests.support.checkpoints import Checkpoint, random_prompt
from tests.support.tiny_driver import Greedy, GreedySampler, TinyDriver, new_sequence


@pytest.mark.parametrize("tp", [1, 3])
def test_a_preempted_sequence_goes_on_elsewhere(
    checkpoints: dict[str, Checkpoint], tp: int
) -> None:
    checkpoint = checkpoints["smollm2"]
    prompt = random_prompt(11, 320)
    driver = TinyDriver(checkpoint, tp=tp)
    driver.step([driver.schedule(0, 0, 11, samples=True)], [new_sequence(0, prompt)])
    driver.step([driver.schedule(0, 11, 1, samples=True)])
    done = driver.results[0]
    again = new_sequence(0, prompt + done, num_prompt=11)
    preempted = driver.release(0)
    driver.step([driver.schedule(0, 0, 13, samples=True)], [again], finished=[preempted])
    for position in range(13, 20):
        driver.step([driver.schedule(0, position, 1, samples=True)])
    assert driver.results[0] == checkpoint.greedy(prompt, 10)


def test_ranks_disagree_on_the_tokens(checkpoints: dict[str, Checkpoint]) -> None:
    driver = TinyDriver(checkpoints["qwen3"], tp=4)
    prompts = [random_prompt(n, 320, seed=n) for n in (9, 2)]
    tokens = driver.generate(prompts, num_tokens=5)
    for seq_id, (prompt, new) in enumerate(zip(prompts, tokens, strict=True)):
        assert all(driver.token_ids_on(rank, seq_id) == prompt + new for rank in range(4))


def test_a_chunk_that_samples_nothing_answers_with_a_token(
    checkpoints: dict[str, Checkpoint],
) -> None:
    driver = TinyDriver(checkpoints["llama"])
    new = new_sequence(0, random_prompt(9, 320))
    assert driver.step([driver.schedule(0, 0, 4, samples=False)], [new]) == BatchResult(step=0)
    assert len(driver.step([driver.schedule(0, 4, 5, samples=True)]).tokens) == 1


def test_a_batch_that_only_finishes_fails(checkpoints: dict[str, Checkpoint]) -> None:
    driver = TinyDriver(checkpoints["llama"], tp=2)
    new = new_sequence(0, random_prompt(4, 320))
    driver.step([driver.schedule(0, 0, 4, samples=True)], [new])
    assert driver.step([], finished=[0]) == BatchResult(step=1)
    assert all(not runner._sequences for runner in driver.runners)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("chunk", [5, 100])
def test_prompt_scores_are_of_other_tokens(
    checkpoints: dict[str, Checkpoint], chunk: int, tp: int
) -> None:
    checkpoint = checkpoints["llama"]
    prompt = random_prompt(17, 320)
    new = new_sequence(0, prompt, SamplingParams(temperature=0, prompt_logprobs=0))
    driver = TinyDriver(checkpoint, tp=tp)
    found: dict[int, float] = {}
    for start in range(0, 17, chunk):
        num = min(chunk, 17 - start)
        scheduled = driver.schedule(0, start, num, samples=start + num == 17)
        result = driver.step([scheduled], [new] if start == 0 else [])
        for scores in result.prompt_logprobs:
            for i, position in enumerate(scores.positions):
                assert position.token_ids == (prompt[scores.start + i],)
                found[scores.start + i] = position.logprobs[0]
    logprobs_TV = checkpoint.logits(prompt).log_softmax(dim=-1)
    expected = [logprobs_TV[i, prompt[i + 1]].item() for i in range(16)]
    assert list(found) == list(range(1, 17))
    assert list(found.values()) == pytest.approx(expected, abs=1e-4)


class OneFails(GreedySampler):
    """Fails sequence 1, as its logits processor would."""

    def sample(self, logits_RV: Tensor, sequences: Sequence[SequenceState]) -> Greedy:
        greedy = super().sample(logits_RV, sequences)
        failure = SequenceFailure(seq_id=1, failure=None)  # type: ignore[arg-type]
        return Greedy(
            token_ids=[0 if t.seq_id == 1 else t.token_id for t in greedy.tokens],
            tokens=tuple(t for t in greedy.tokens if t.seq_id != 1),
            failures=(failure,) if any(s.spec.seq_id == 1 for s in sequences) else (),
        )


def test_a_failed_sequence_takes_others_with_it(checkpoints: dict[str, Checkpoint]) -> None:
    checkpoint = checkpoints["mistral"]
    driver = TinyDriver(checkpoint, tp=2, sampler=OneFails())
    prompts = [random_prompt(n, 320, seed=n) for n in (5, 6)]
    new = [new_sequence(i, p) for i, p in enumerate(prompts)]
    scheduled = [driver.schedule(i, 0, len(p), samples=True) for i, p in enumerate(prompts)]
    result = driver.step(scheduled, new)
    assert [f.seq_id for f in result.failures] == [1]
    assert [t.seq_id for t in result.tokens] == [0]
    assert driver.token_ids_on(1, 1) == [*prompts[1], 0]
    for position in range(5, 12):
        ran_on = [driver.schedule(1, 6, 1, samples=True)] if position == 5 else []
        driver.step([driver.schedule(0, position, 1, samples=True), *ran_on])
    assert driver.results[0] == checkpoint.greedy(prompts[0], 8)


def test_a_cache_that_was_not_written_reaches_the_result(
    checkpoints: dict[str, Checkpoint],
) -> None:
    """Padding and the rest of a block are multiplied by 0: they must not be NaN."""
    driver = TinyDriver(checkpoints["llama"], block_size=16)
    prompts = [random_prompt(n, 320, seed=n) for n in (1, 100)]
    for tokens, prompt in zip(driver.generate(prompts, num_tokens=4), prompts, strict=True):
        assert tokens == checkpoints["llama"].greedy(prompt, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_farther_from_float32_than_in_transformers(
    checkpoints: dict[str, Checkpoint], dtype: torch.dtype
) -> None:
    for family in ("smollm2", "qwen3"):
        checkpoint = checkpoints[family]
        prompt = random_prompt(30, 320)
        expected_V = checkpoint.logits(prompt)[-1]
        half = copy.deepcopy(checkpoint.reference).to(dtype)
        theirs = (half(torch.tensor([prompt])).logits[0, -1] - expected_V).abs().mean()
        driver = TinyDriver(checkpoint, tp=2, dtype=dtype, sampler=(keeper := LogitsKeeper()))
        driver.generate([prompt], num_tokens=1, chunk=7)
        ours = (keeper.logits_RV[0] - expected_V).abs().mean()
        assert ours < 2 * theirs


class LogitsKeeper(GreedySampler):
    """Keeps the logits it was given last."""

    logits_RV: Tensor

    def sample(self, logits_RV: Tensor, sequences: Sequence[SequenceState]) -> Greedy:
        assert logits_RV.dtype == torch.float32
        self.logits_RV = logits_RV
        return super().sample(logits_RV, sequences)
