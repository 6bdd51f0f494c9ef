"""ModelConfig: the shape of a model as plain data, read from a `config.json` of transformers.

No tensor, no torch: the driver checks requests against it, every rank builds its shard from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from llmrt.architectures import ARCHITECTURES
from llmrt.config_fields import ConfigFields, as_count, as_number
from llmrt.errors import ConfigError

SUPPORTED_ARCHITECTURES = tuple(ARCHITECTURES)
SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")
SUPPORTED_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
SUPPORTED_ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding."""

    theta: float = 10000.0
    kind: str = "default"
    """`default`, `linear`, `dynamic`, `yarn` or `llama3`, as transformers' `rope_type`."""
    parameters: Mapping[str, Any] | None = None
    """The scaling parameters of that kind, under transformers' names; None for `default`."""

    @property
    def depends_on_prompt_length(self) -> bool:
        """Whether the same token at the same place is rotated differently in a longer prompt.

        Cached keys then belong to one prompt only, and no prefix may be shared between requests.
        """
        return self.kind == "dynamic"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only model of the Llama family."""

    architecture: str
    """The class name in transformers, as `LlamaForCausalLM`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    """Longest sequence, scaling included."""
    rope: RopeConfig
    tie_word_embeddings: bool
    dtype: str
    """What the checkpoint says it is stored in: `float32`, `bfloat16` or `float16`."""
    hidden_act: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k before the rotation (Qwen3)."""
    windows: tuple[int | None, ...] = ()
    """By layer: its sliding window in tokens, or None for full attention."""
    eos_token_ids: tuple[int, ...] = ()
    """Union of what config.json and generation_config.json name; the tokenizer adds its own."""

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Read a `config.json`, as transformers 4 or 5 writes it, and its `generation_config.json`.

        Raises:
            ConfigError: the architecture or an option of it is not supported, or a value cannot be;
                the message names the field.
        """
        return _Reading(config, generation_config or {}).model_config()


def check_tp(model: ModelConfig, tp: int) -> None:
    """Raise ConfigError where a model cannot be split over *tp* ranks."""
    if tp > model.num_heads:
        raise ConfigError(
            f"tp={tp} is above this model's limit: it has {model.num_heads} attention heads and "
            f"every rank needs one, so tp can be 1 to {model.num_heads}."
        )


_ROPE_REQUIRES = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


class _Reading:
    """One reading of a `config.json`: each method reads one subject."""

    def __init__(self, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> None:
        self._fields = ConfigFields(config)
        self._sources = (config, generation_config)
        self._name = _supported_architecture(config)
        self._defaults = ARCHITECTURES[self._name]

    def model_config(self) -> ModelConfig:
        self._refuse_what_is_not_built()
        num_heads = self._fields.count("num_attention_heads")
        rope = self._rope()
        return ModelConfig(
            architecture=self._name,
            vocab_size=self._fields.count("vocab_size"),
            hidden_size=self._fields.count("hidden_size"),
            intermediate_size=self._fields.count("intermediate_size"),
            num_layers=self._fields.count("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=self._num_kv_heads(num_heads),
            head_dim=self._head_dim(num_heads),
            rms_norm_eps=self._fields.number("rms_norm_eps", 1e-6),
            max_position_embeddings=self._context_limit(rope),
            rope=rope,
            tie_word_embeddings=self._fields.flag("tie_word_embeddings", False),
            dtype=self._dtype(),
            hidden_act=self._fields.choice("hidden_act", "silu", SUPPORTED_ACTIVATIONS),
            qkv_bias=self._qkv_bias(),
            o_bias=self._defaults.has_o_bias and self._fields.flag("attention_bias", False),
            mlp_bias=self._name == "LlamaForCausalLM" and self._fields.flag("mlp_bias", False),
            qk_norm=self._defaults.qk_norm,
            windows=self._windows(),
            eos_token_ids=self._eos_token_ids(),
        )

    def _refuse_what_is_not_built(self) -> None:
        quantization = self._fields.raw("quantization_config")
        if quantization:
            method = dict(quantization).get("quant_method", "unknown")
            raise ConfigError(
                f"The checkpoint is quantised ({method!r} in config.json's quantization_config), "
                "which llmrt cannot read; use the unquantised checkpoint or a GGUF file."
            )

    def _num_kv_heads(self, num_heads: int) -> int:
        num_kv_heads = self._fields.count(
            "num_key_value_heads", self._defaults.num_kv_heads or num_heads
        )
        if num_heads % num_kv_heads:
            raise ConfigError(
                f"num_attention_heads={num_heads} in config.json is not a multiple of "
                f"num_key_value_heads={num_kv_heads}."
            )
        return num_kv_heads

    def _head_dim(self, num_heads: int) -> int:
        hidden_size = self._fields.count("hidden_size")
        given = self._fields.raw("head_dim") is not None or self._defaults.head_dim is not None
        if not given and hidden_size % num_heads:
            raise ConfigError(
                f"config.json has no head_dim, and hidden_size={hidden_size} is not a multiple of "
                f"num_attention_heads={num_heads}."
            )
        head_dim = self._fields.count(
            "head_dim", self._defaults.head_dim or hidden_size // num_heads
        )
        if head_dim % 2:
            raise ConfigError(f"head_dim={head_dim} in config.json is odd; rotation needs pairs.")
        return head_dim

    def _dtype(self) -> str:
        """Return `dtype` (transformers 5) or `torch_dtype` (transformers 4)."""
        field = "dtype" if self._fields.raw("dtype") is not None else "torch_dtype"
        return self._fields.choice(field, "float32", SUPPORTED_DTYPES)

    def _qkv_bias(self) -> bool:
        default = self._defaults.qkv_bias
        return (
            self._fields.flag("attention_bias", default) if self._defaults.reads_biases else default
        )

    def _windows(self) -> tuple[int | None, ...]:
        num_layers = self._fields.count("num_hidden_layers")
        size = self._window_size()
        kinds = self._fields.raw("layer_types")
        if size is None or (kinds is None and self._first_window_layer() >= num_layers):
            return (None,) * num_layers
        if kinds is None:
            first = self._first_window_layer()
            return tuple(size if layer >= first else None for layer in range(num_layers))
        return tuple(size if k == "sliding_attention" else None for k in self._layer_types(kinds))

    def _window_size(self) -> int | None:
        """Return the window where the model has one and its use is switched on."""
        if not self._defaults.has_windows:
            return None
        if not self._fields.flag("use_sliding_window", self._defaults.use_window):
            return None
        names_size = self._fields.names("sliding_window")
        size = self._fields.raw("sliding_window") if names_size else self._defaults.window
        return None if size is None else as_count("sliding_window", size)

    def _first_window_layer(self) -> int:
        default = self._defaults.max_window_layers
        return self._fields.count("max_window_layers", default, at_least=0)

    def _layer_types(self, kinds: Any) -> list[str]:
        known = ("full_attention", "sliding_attention")
        num_layers = self._fields.count("num_hidden_layers")
        if not isinstance(kinds, (list, tuple)) or len(cast("list[object]", kinds)) != num_layers:
            raise ConfigError(
                f"layer_types in config.json must name each of the {num_layers} layers."
            )
        names = [str(kind) for kind in cast("list[object]", kinds)]
        for kind in names:
            if kind not in known:
                raise ConfigError(
                    f"layer_types in config.json names {kind!r}; llmrt knows {', '.join(known)}."
                )
        return names

    def _rope(self) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
        given: Any = self._fields.raw("rope_parameters") or self._fields.raw("rope_scaling") or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"rope_parameters in config.json must be an object, not {given!r}.")
        parameters = dict(cast("Mapping[str, Any]", given))
        theta = parameters.pop("rope_theta", None) or self._fields.raw("rope_theta") or 10000.0
        kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
        parameters.pop("type", None)
        self._check_rope(kind, parameters)
        return RopeConfig(
            theta=as_number("rope_theta", theta),
            kind=kind,
            parameters=None if kind == "default" else self._completed_rope(kind, parameters),
        )

    def _check_rope(self, kind: object, parameters: Mapping[str, Any]) -> None:
        if kind not in SUPPORTED_ROPE_KINDS:
            raise ConfigError(
                f"rope_type={kind!r} in config.json is not supported; llmrt has "
                f"{', '.join(SUPPORTED_ROPE_KINDS)}."
            )
        partial = parameters.get("partial_rotary_factor", self._fields.raw("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise ConfigError(f"partial_rotary_factor={partial} in config.json is not supported.")
        for name in _ROPE_REQUIRES[str(kind)]:
            if parameters.get(name) is None:
                raise ConfigError(
                    f"rope_parameters in config.json have no {name!r}, which rope_type={kind!r} "
                    "needs."
                )

    def _completed_rope(self, kind: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """Add the length before scaling, and yarn's factor where only the lengths say it."""
        limit = self._stated_limit()
        outer = self._fields.raw("original_max_position_embeddings")
        original = outer or parameters.get("original_max_position_embeddings") or limit
        if kind == "dynamic":
            original = limit
        parameters["original_max_position_embeddings"] = as_count(
            "original_max_position_embeddings", original
        )
        if parameters.get("factor") is None:
            parameters["factor"] = limit / original
        parameters["factor"] = as_number("factor", parameters["factor"])
        return parameters

    def _stated_limit(self) -> int:
        default = self._defaults.max_position_embeddings
        return self._fields.count("max_position_embeddings", default)

    def _context_limit(self, rope: RopeConfig) -> int:
        """Return the longest sequence.

        linear and dynamic: max_position_embeddings x factor. yarn: the original length x factor,
        but no less than max_position_embeddings, which some checkpoints give scaled and some do
        not. default and llama3: max_position_embeddings.
        """
        limit = self._stated_limit()
        if rope.parameters is None or rope.kind == "llama3":
            return limit
        original = rope.parameters["original_max_position_embeddings"]
        base = original if rope.kind == "yarn" else limit
        return max(limit, int(base * rope.parameters["factor"]))

    def _eos_token_ids(self) -> tuple[int, ...]:
        """Return what both files name, each id once, config.json's first."""
        ids: dict[int, None] = {}
        for source in self._sources:
            value: Any = source.get("eos_token_id")
            named = cast("list[object]", value if isinstance(value, (list, tuple)) else [value])
            for token_id in named:
                if token_id is not None:
                    ids[as_count("eos_token_id", token_id, at_least=0)] = None
        return tuple(ids)


def _supported_architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or ()
    for name in named:
        if name in ARCHITECTURES:
            return name
    found = ", ".join(str(n) for n in named) or "none (config.json has no 'architectures')"
    raise ConfigError(
        f"Architecture not supported: {found}. llmrt runs {', '.join(SUPPORTED_ARCHITECTURES)}."
    )
