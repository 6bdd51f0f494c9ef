"""Small tokenizers of the kinds that models have, by hand: training one would start threads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from llmrt.checkpoint.checkpoint import Checkpoint
from llmrt.tokenizer import Tokenizer

SPECIALS = ("<unk>", "<s>", "</s>")
SPACE = "\u2581"

_BYTE_LEVEL_MERGES = ("t h", "th e", "Ġ the", "e r", "i n", "Ġ Ġ", "ð Ł", "ĺ Ģ", "Ã ©", "ä ½")
"""The last four join bytes: the first half of an emoji, its second half, é, two thirds of 你."""

_PIECES = (
    SPACE, SPACE * 2, "t", "h", "e", "a", "b", "l", "o", "d", "w", "x", ".", "é", "<", ">",
    "th", "the", SPACE + "the", "lo", SPACE + "a", SPACE + "w", "wo", "wo" + "lo",
)  # fmt: skip


def byte_level_backend() -> Backend:
    """Return a tokenizer in the style of GPT-2 and its heirs."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left, right in (m.split(" ") for m in _BYTE_LEVEL_MERGES)]
    tokens = [*SPECIALS, *alphabet, *dict.fromkeys(a + b for a, b in merges)]
    backend = Backend(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    backend.add_tokens(["<tool>"])
    return backend


def llama_backend() -> Backend:
    """Return a SentencePiece-like tokenizer with byte tokens, as Llama 2 has it."""
    backend = _sentencepiece_model()
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


def metaspace_backend() -> Backend:
    """Return the same with the Metaspace parts that later models use."""
    backend = _sentencepiece_model()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)]
    )
    return backend


BACKENDS = {
    "byte-level": byte_level_backend,
    "llama": llama_backend,
    "metaspace": metaspace_backend,
}


def with_bos(backend: Backend) -> Backend:
    """Make a tokenizer put <s> first."""
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def tokenizer_of(backend: Backend, **settings: Any) -> Tokenizer:
    """Return llmrt's tokenizer around a backend."""
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    template = settings.get("chat_template")
    return Tokenizer(
        backend,
        name="tiny",
        settings=roles | settings,
        templates={"default": template} if isinstance(template, str) else template,
    )


def write_tokenizer(directory: Path, backend: Backend, settings: Mapping[str, Any]) -> Checkpoint:
    """Write the tokenizer's files into a directory; return the checkpoint they are part of."""
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(dict(settings)))
    return Checkpoint(name="tiny", directory=directory, weights=str(directory), config={})


def _sentencepiece_model() -> Backend:
    tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in _PIECES
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    backend = Backend(model)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    return backend
