"""What can be served at all: the scheduler's limits, and the check of a request against them."""

from __future__ import annotations

from dataclasses import dataclass

from llmrt.errors import ConfigError, RequestError
from llmrt.scheduler.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """The room that a scheduler deals out.

    Raises:
        ConfigError: a limit is not a whole number above 0, or a step cannot hold a token of every
        sequence.
    """

    num_blocks: int
    """Blocks of the KV cache; the same on every rank."""
    block_size: int
    """Tokens in one block."""
    max_num_seqs: int
    """Most sequences that run at one time."""
    max_num_batched_tokens: int
    """Most tokens in one step."""
    max_model_len: int
    """Longest sequence, prompt and output together."""
    prefix_caching: bool = True
    cache_salt: bytes = b""
    """Goes into the hash of every cached block, so that hashes of two engines are never equal."""

    def __post_init__(self) -> None:
        for name in (
            "num_blocks",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_num_seqs={self.max_num_seqs}: one step must hold a token of every sequence."
            )

    @property
    def cache_tokens(self) -> int:
        """Return how many tokens the KV cache holds."""
        return self.num_blocks * self.block_size

    @property
    def length_limit(self) -> int:
        """Return the longest that a sequence can become here, prompt and output together."""
        return min(self.max_model_len, self.cache_tokens)


def check_request(config: SchedulerConfig, request: Request) -> None:
    """Raise RequestError where *request* can never be served.

    A prompt must leave room for one token within `max_model_len` and within the KV cache. With
    `max_tokens=0` nothing is generated, and it may fill them. A request that fits so far, but not
    with all of its `max_tokens`, ends with "length".
    """
    num_prompt = request.num_prompt_tokens
    if num_prompt == 0:
        raise RequestError(
            f"Request {request.request_id!r} has an empty prompt; give it at least one token."
        )
    generates = request.params.max_tokens != 0
    needed = num_prompt + (1 if generates else 0)
    asked = f"Request {request.request_id!r}: its prompt has {num_prompt} tokens" + (
        ", and one more must fit to be generated" if generates else ""
    )
    if needed > config.max_model_len:
        raise RequestError(
            f"{asked}, but max_model_len is {config.max_model_len}; "
            "shorten the prompt or open the engine with a larger max_model_len."
        )
    if needed > config.cache_tokens:
        raise RequestError(
            f"{asked}, but the KV cache holds {config.cache_tokens} "
            f"({config.num_blocks} blocks of {config.block_size}); "
            "shorten the prompt or open the engine with more kv_cache_bytes."
        )


def max_output_tokens(config: SchedulerConfig, request: Request) -> int:
    """Return how many tokens each completion of *request* may have before it ends with "length"."""
    room = config.length_limit - request.num_prompt_tokens
    asked = request.params.max_tokens
    return room if asked is None else min(asked, room)
