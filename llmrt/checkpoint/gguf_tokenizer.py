"""From the vocabulary in a GGUF file to tokenizer.json, the format of the tokenizers library.

Two kinds exist: `gpt2`, byte-level BPE, where `tokenizer.ggml.pre` names how text is cut before
merging; and `llama`, SentencePiece BPE, whose merges follow from its scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmrt.errors import ConfigError

CONTROL, USER_DEFINED = 3, 4
SPACE = "\u2581"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGIT = r"\p{N}"

PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": (_GPT2,),
    "gpt-2": (_GPT2,),
    "smollm": (_DIGIT, _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "falcon3": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "dbrx": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "megrez": (_QWEN2,),
    "tekken": (_TEKKEN,),
}
"""By `tokenizer.ggml.pre`: the patterns that cut the text, one after the other."""

_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return tokenizer.json.

    Raises:
        ConfigError: the kind of tokenizer is not supported.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        parts = _byte_level(metadata)
    elif kind == "llama":
        parts = _sentencepiece(metadata)
    else:
        raise ConfigError(
            f"The GGUF file has a tokenizer of kind {kind!r}; supported are 'gpt2' and 'llama'. "
            "Use the model's safetensors files instead."
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata),
        **parts,
        "post_processor": _post_processor(metadata),
    }


def tokenizer_config_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return tokenizer_config.json: special tokens by their role, and the chat templates."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {"add_bos_token": _adds_bos(metadata), "add_eos_token": False}
    for role, key in _NAMED.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        if token_id is not None:
            config[role] = tokens[token_id]
    template = metadata.get("tokenizer.chat_template")
    named = [
        {"name": name, "template": metadata[f"tokenizer.chat_template.{name}"]}
        for name in metadata.get("tokenizer.chat_templates", ())
    ]
    if named:
        default = [{"name": "default", "template": template}] if template else []
        config["chat_template"] = default + named
    elif template:
        config["chat_template"] = template
    return config


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    by_default = metadata.get("tokenizer.ggml.model") == "llama"
    has_bos = metadata.get("tokenizer.ggml.bos_token_id") is not None
    return has_bos and bool(metadata.get("tokenizer.ggml.add_bos_token", by_default))


def _added_tokens(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for token_id, (token, kind) in enumerate(_typed_tokens(metadata))
        if kind in (CONTROL, USER_DEFINED)
    ]


def _typed_tokens(metadata: Mapping[str, Any]) -> list[tuple[str, int]]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    return list(zip(tokens, types, strict=True))


def _post_processor(metadata: Mapping[str, Any]) -> dict[str, Any]:
    def part(kind: str, content: str, type_id: int) -> dict[str, Any]:
        return {kind: {"id": content, "type_id": type_id}}

    single = [part("Sequence", "A", 0)]
    pair = [part("Sequence", "A", 0), part("Sequence", "B", 1)]
    special: dict[str, Any] = {}
    if _adds_bos(metadata):
        bos_id = metadata["tokenizer.ggml.bos_token_id"]
        bos = metadata["tokenizer.ggml.tokens"][bos_id]
        single.insert(0, part("SpecialToken", bos, 0))
        pair.insert(0, part("SpecialToken", bos, 0))
        special[bos] = {"id": bos, "ids": [bos_id], "tokens": [bos]}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": special,
    }


def _bpe(vocabulary: Mapping[str, int], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
        **options,
    }


# ---- byte-level ----


def _byte_level(metadata: Mapping[str, Any]) -> dict[str, Any]:
    alphabet = _byte_alphabet()
    letters = set(alphabet)

    def spell(token: str, kind: int) -> str:
        if kind in (CONTROL, USER_DEFINED) or letters.issuperset(token):
            return token
        return "".join(alphabet[byte] for byte in token.encode())

    pre = metadata.get("tokenizer.ggml.pre", "default")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    vocabulary = {spell(*typed): i for i, typed in enumerate(_typed_tokens(metadata))}
    merges = [merge.split(" ", 1) for merge in metadata.get("tokenizer.ggml.merges", ())]
    return {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                *(_split(pattern) for pattern in _patterns(pre)),
                {**byte_level, "use_regex": False},
            ],
        },
        "decoder": {**byte_level, "use_regex": True},
        # Llama 3's vocabulary holds words that its merges do not reach.
        "model": _bpe(vocabulary, merges, ignore_merges=_patterns(pre) == (_LLAMA3,)),
    }


def _patterns(pre: str) -> tuple[str, ...]:
    if pre not in PRE_TOKENIZERS:
        raise ConfigError(
            f"The GGUF file's tokenizer cuts text as {pre!r}, which llmrt does not know; it knows "
            f"{', '.join(PRE_TOKENIZERS)}. Use the model's safetensors files instead."
        )
    return PRE_TOKENIZERS[pre]


def _split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _byte_alphabet() -> list[str]:
    """Return the character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


# ---- SentencePiece ----


def _sentencepiece(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    scores = dict(zip(tokens, metadata["tokenizer.ggml.scores"], strict=True))
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id")
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    unreplace = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                *([{"type": "Prepend", "prepend": SPACE}] if prefixed else []),
                replace,
            ],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                unreplace,
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *([strip] if prefixed else []),
            ],
        },
        "model": _bpe(
            vocabulary,
            _merges_from_scores(vocabulary, scores),
            unk_token=None if unknown_id is None else tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _merges_from_scores(
    vocabulary: Mapping[str, int], scores: Mapping[str, float]
) -> list[list[str]]:
    """Return every pair of tokens that join into a third, in SentencePiece's order of joining."""
    merges: list[tuple[float, int, int, str, str]] = []
    for token, score in scores.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-score, vocabulary[left], vocabulary[right], left, right))
    return [[left, right] for _, _, _, left, right in sorted(merges)]
