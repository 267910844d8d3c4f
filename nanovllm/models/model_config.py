"""The facts of a model that its config.json states, checked before anything is built from them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanovllm.layers.rotary_embedding import RopeScaling
from nanovllm.models.config_defaults import with_defaults
from nanovllm.models.moe_config import MoeConfig, read_moe
from nanovllm.models.quantization_config import read_quantization
from nanovllm.models.registry import supported_architectures
from nanovllm.models.rope_config import read_rope
from nanovllm.models.window_config import read_sliding_window
from nanovllm.utils.checks import check_bool, check_choice, check_float, check_int, errors_named
from nanovllm.utils.json_file import read_json_object

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_MAX_SIZE = 2**24  # of any one dimension: far above every model, far below what overflows


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What config.json says. Never written after construction."""

    architecture: str
    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    attention_bias: bool
    hidden_act: str
    tie_word_embeddings: bool
    max_position_embeddings: int
    sliding_window: int | None  # of every layer; tokens see this many positions, None: all
    rope_theta: float
    rope_scaling: RopeScaling | None
    dtype: torch.dtype | None  # of the checkpoint; None when it does not say
    eos_token_ids: tuple[int, ...]
    moe: MoeConfig | None = None  # None: every layer is dense
    quantization: str | None = None  # of the linear layers: "fp8_channel", "fp8_block", or "fp8"

    @property
    def max_context_len(self) -> int:
        """Positions that can be used: YaRN goes beyond `max_position_embeddings`.

        A sliding window ends them, as up to its size it hides nothing and attention is the same.
        """
        length, scaling = self.max_position_embeddings, self.rope_scaling
        if scaling is not None and scaling.rope_type == "yarn":
            assert scaling.original_max_position_embeddings is not None, "read_rope fills it in"
            extended = int(scaling.original_max_position_embeddings * scaling.factor)
            length = max(length, extended)
        return length if self.sliding_window is None else min(length, self.sliding_window)

    @classmethod
    def from_dict(cls, d: dict[str, Any], source: str) -> "ModelConfig":
        """Check the fields of a parsed config.json; errors name `source`, field and value."""
        with errors_named(source):
            return _read(cls, d)


def load_model_config(model_dir: str | Path) -> ModelConfig:
    """Read `config.json` of a model's directory; a fault is a ValueError that names the file."""
    path = Path(model_dir) / "config.json"
    if not path.is_file():
        is_adapter = path.with_name("adapter_config.json").is_file()
        raise ValueError(
            f"{path} does not exist. The model must be a local directory with config.json, "
            "*.safetensors and a tokenizer."
            + " This one is an adapter: pass it as lora, with its base as the model."
            * is_adapter
        )
    return ModelConfig.from_dict(read_json_object(path), str(path))


def _read(cls: type[ModelConfig], d: dict[str, Any]) -> ModelConfig:
    architecture = _read_architecture(d)
    d = with_defaults(architecture, d)
    _refuse_llama_variants(d)
    num_heads = _size(d, "num_attention_heads")
    num_kv_heads = _size(d, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_attention_heads = {num_heads} must be a multiple of "
            f"num_key_value_heads = {num_kv_heads}."
        )
    hidden_size = _size(d, "hidden_size")
    head_dim = _read_head_dim(d, hidden_size, num_heads)
    max_position_embeddings = check_int(
        "max_position_embeddings",
        _required(d, "max_position_embeddings"),
        minimum=2,  # a token of the prompt and one of the answer
        maximum=2**31 - 1,
    )
    sliding_window = read_sliding_window(d, architecture, max_position_embeddings)
    rope_theta, rope_scaling = read_rope(d, max_position_embeddings)
    if rope_scaling is not None and architecture == "Phi3ForCausalLM":
        raise ValueError(
            f"rope_type {rope_scaling.rope_type!r} is not supported for Phi-3: its checkpoints "
            "have no scaling or LongRoPE, which early ones call 'su' or 'yarn': also unsupported."
        )
    num_layers = _size(d, "num_hidden_layers", maximum=2**16)
    return cls(
        architecture=architecture,
        model_type=_str(d, "model_type"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=_size(d, "intermediate_size"),
        vocab_size=_size(d, "vocab_size"),
        rms_norm_eps=check_float("rms_norm_eps", _required(d, "rms_norm_eps"), above=0, maximum=1),
        attention_bias=_bool(d, "attention_bias"),
        hidden_act=check_choice("hidden_act", d.get("hidden_act", "silu"), ["silu"]),
        tie_word_embeddings=_bool(d, "tie_word_embeddings"),
        max_position_embeddings=max_position_embeddings,
        sliding_window=sliding_window,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        dtype=_read_dtype(d),
        eos_token_ids=_read_eos(d.get("eos_token_id")),
        moe=read_moe(d, architecture, num_layers),
        quantization=read_quantization(d),
    )


def _required(d: dict[str, Any], key: str) -> Any:
    if d.get(key) is None:
        raise ValueError(f"{key} is missing; the model cannot be built without it.")
    return d[key]


def _size(
    d: dict[str, Any], key: str, *, default: int | None = None, maximum: int = _MAX_SIZE
) -> int:
    if default is not None and d.get(key) is None:
        return default
    return check_int(key, _required(d, key), minimum=1, maximum=maximum)


def _bool(d: dict[str, Any], key: str) -> bool:
    value = d.get(key)
    return False if value is None else check_bool(key, value)


def _str(d: dict[str, Any], key: str) -> str:
    value = d.get(key, "")
    if not isinstance(value, str):
        raise TypeError(f"{key} must be a string, got {value!r}.")
    return value


def _read_architecture(d: dict[str, Any]) -> str:
    names = _required(d, "architectures")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"architectures must be a list of names, got {names!r}.")
    supported = supported_architectures()
    for name in names:
        if name in supported:
            return str(name)
    raise ValueError(
        f"architectures {names!r} are not supported; one of {supported} must be in it."
    )


def _read_head_dim(d: dict[str, Any], hidden_size: int, num_heads: int) -> int:
    if d.get("head_dim") is None:
        if hidden_size % num_heads:
            raise ValueError(
                f"head_dim is missing, and hidden_size = {hidden_size} is not a multiple of "
                f"num_attention_heads = {num_heads} to derive it from."
            )
        head_dim = hidden_size // num_heads
    else:
        head_dim = check_int("head_dim", d["head_dim"], minimum=2, maximum=2**16)
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for rotary embeddings, got {head_dim}.")
    return head_dim


def _refuse_llama_variants(d: dict[str, Any]) -> None:
    if _bool(d, "mlp_bias"):
        raise ValueError("mlp_bias = true is not supported; feed-forward layers have no bias here.")
    pretraining_tp = _size(d, "pretraining_tp", default=1)
    if pretraining_tp > 1:
        raise ValueError(
            f"pretraining_tp = {pretraining_tp} is not supported. Set it to 1: the weights are the "
            "same, only float rounding differs."
        )


def _read_dtype(d: dict[str, Any]) -> torch.dtype | None:
    found = {}
    for key in ("dtype", "torch_dtype"):  # transformers 5 and 4
        if d.get(key) is not None:
            name = d[key].removeprefix("torch.") if isinstance(d[key], str) else d[key]
            found[key] = _DTYPES[check_choice(key, name, list(_DTYPES))]
    if len(set(found.values())) > 1:
        raise ValueError(
            f"dtype {d['dtype']!r} and torch_dtype {d['torch_dtype']!r} differ; remove one of them."
        )
    return next(iter(found.values()), None)


def _read_eos(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    ids = [check_int("eos_token_id", item, minimum=0, maximum=2**31 - 1) for item in values]
    return tuple(dict.fromkeys(ids))
