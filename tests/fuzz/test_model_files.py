"""Model files with anything in them: they load, or an error names the file, soon and cheaply.

Every field is given values at and beyond every edge, in files of a model that loads. The limit on
memory is real: what asks for a gigabyte more than the process has fails the test.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fuzz.json_values import NUM_EXAMPLES, VALUES, mutated, short
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lora_adapters import write_adapter
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.utils.json_file import read_json_object
from nanovllm.utils.loader import INDEX_NAME, tensor_shapes

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 16}
ROOM_BYTES = 1 << 30


def fuzzed(strategy: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """Give a test its mutations."""
    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    limits = settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=quiet)
    return lambda check: limits(given(mutation=strategy)(check))


@contextmanager
def little_memory() -> Iterator[None]:
    """Let the process map a gigabyte more than it has, no more."""
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ROOM_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def load(directory: Path, what: Any, **options: Any) -> str | None:
    """The error's text, or None if the model loads and runs; asserts that it is a good error."""
    started = time.process_time()
    error = None
    try:
        with little_memory(), LLM(directory, **OPTIONS, **options) as llm:
            params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
            prompts = [[5, 6, 7]] if llm.max_model_len > 5 else []
            for output in llm.generate(prompts, params, use_tqdm=False):
                for position in output.prompt_logprobs[1:]:
                    for entry in position.values():
                        assert entry.logprob == entry.logprob, f"NaN with {short(what)}"
            llm.get_default_sampling_params()
            if llm._engine.tokenizer is not None:
                llm.generate(["hi ü"], params, use_tqdm=False, return_errors=True)
    except (ValueError, TypeError, OSError) as caught:
        error = str(caught)
        # Not only that it is named: that it is named before what may be long.
        assert str(directory) in error[:3000], f"{short(what)}: {error[:300]}"
    assert time.process_time() - started < 10, f"slow: {short(what)}"
    return error


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    if not directory.exists():
        shutil.copytree(tiny_model, directory)
    return directory


BASES: dict[str, dict[str, Any]] = {
    "config.json": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "vocab_size": 517,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 256,
            "attention_factor": 1.0,
            "mscale": 1.0,
            "beta_fast": 32,
        },
        "tie_word_embeddings": False,
        "eos_token_id": [2, 3],
        "torch_dtype": "float32",
        "attention_bias": False,
        "layer_types": ["full_attention"] * 2,
    },
    "generation_config.json": {
        "eos_token_id": [2],
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.1,
        "max_new_tokens": 100,
        "do_sample": True,
    },
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": "{{ messages }}",
        "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}},
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "extra_special_tokens": {},
    },
}
EXTRA = {
    "config.json": (
        *("quantization_config", "compression_config", "dtype", "rope_parameters", "mlp_bias"),
        *("sliding_window", "use_sliding_window", "num_experts", "partial_rotary_factor"),
        *("original_max_position_embeddings", "hidden_act", "pretraining_tp"),
    ),
    "generation_config.json": ("num_beams", "max_length", "bos_token_id"),
    "tokenizer_config.json": ("auto_map", "bos_token", "unk_token", "padding_side", "backend"),
}


@pytest.mark.parametrize("name", BASES)
@fuzzed(st.data())
def test_mutated_json_files_load_or_are_named(model, name, mutation):
    data = mutation.draw(mutated(BASES[name], EXTRA[name]))
    path = model / name
    before = path.read_bytes() if path.exists() else None
    path.write_text(json.dumps(data))
    load(model, data)
    path.unlink() if before is None else path.write_bytes(before)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 2**24}, "vocab_size = 16777216, but .*embed_tokens"),
        ({"hidden_size": 2**20}, "hidden_size = 1048576, but"),
        ({"intermediate_size": 2**24}, "intermediate_size = 16777216, but"),
        ({"num_attention_heads": 2**20}, r"num_attention_heads \* head_dim = 33554432, but"),
        ({"head_dim": 2**16}, r"num_attention_heads \* head_dim = 262144, but"),
        ({"num_hidden_layers": 2**16}, "num_hidden_layers = 65536, but the checkpoint has 2"),
        ({"num_hidden_layers": 3}, "num_hidden_layers = 3, but the checkpoint has 2"),
        ({"max_position_embeddings": 2**31 - 1}, "max_position_embeddings .*2147483647 positions"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 1e308}},
            "rope_scaling.factor must be a finite number in .1, 1e.06.",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 1e6}},
            "factor of its rope scaling.* allows 512000000 positions",
        ),
        ({"rope_theta": 1e300}, "rope_theta must be a finite number"),
        (  # cosines of 1e30 made every logit NaN, and every token the first
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1e30}},
            "attention_factor must be a finite number",
        ),
    ],
    ids=str,
)
def test_a_number_that_is_too_large_is_refused_before_memory_is_asked_for(model, changes, words):
    """Sizes that the weights deny, and contexts that nobody asked for, once took gigabytes."""
    config = BASES["config.json"] | {"rope_scaling": None} | changes
    (model / "config.json").write_text(json.dumps(config))
    error = load(model, changes)
    assert error is not None
    with pytest.raises(ValueError, match=f"{model}/config.json.*{words}"):
        raise ValueError(error)


def test_a_long_context_that_is_asked_for_is_given(model):
    config = BASES["config.json"] | {"rope_scaling": None, "max_position_embeddings": 2**31 - 1}
    (model / "config.json").write_text(json.dumps(config))
    assert load(model, config, max_model_len=4096) is None


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_end_that_no_token_can_be_is_left_out_with_a_warning(model, name, caplog):
    """An id of 2**31 - 1 took two gigabytes, a byte for each id below it."""
    (model / name).write_text(json.dumps(BASES[name] | {"eos_token_id": [2, 2**31 - 1]}))
    assert load(model, name) is None
    assert "eos_token_id 2147483647 is beyond vocab_size = 517" in caplog.text


TEXTS = {
    "empty": b"",
    "no object": b"[]",
    "cut": b'{"a": 1',
    "binary": b"\xff\xfe{}",
    "deep": b'{"a":' * 100_000,
    "parsed but too deep to show": b'{"a":' + b"[" * 800 + b"]" * 800 + b"}",
    "a long number": b'{"a": ' + b"9" * 5000 + b"}",
    "two values": b'{"a": {"b": 1, "b": 2}}',
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX_NAME])
def test_a_file_that_is_no_object_of_one_meaning_is_named(model, name, text):
    (model / name).write_bytes(text)
    error = load(model, text[:50])
    assert error is not None and str(model / name) in error


def test_a_byte_order_mark_and_equal_keys_do_no_harm(tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1, "a": 1, "b": [{"c": 2}]}\r\n')
    assert read_json_object(path) == {"a": 1, "b": [{"c": 2}]}


def test_a_huge_json_file_is_not_read(tmp_path):
    path = tmp_path / "x.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole: takes no space
    with pytest.raises(ValueError, match=r"x.json is not valid JSON: it has 1099511627776 bytes"):
        read_json_object(path)


# ---- tokenizer.json, by paths: it is deep


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths into a JSON value; of long lists and objects the first few."""
    yield path
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)[: 12 if len(value) < 20 else 2]
    elif isinstance(value, list):
        keys = list(range(min(len(value), 2)))
    for key in keys:
        yield from paths_of(value[key], (*path, key))


def with_value(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = with_value(value[path[0]], path[1:], new)
    return copy


@fuzzed(st.tuples(st.integers(0, 10**6), VALUES))
def test_mutated_tokenizers_load_or_are_named(tiny_model, model, mutation):
    base = json.loads((tiny_model / "tokenizer.json").read_text())
    paths = list(paths_of(base))
    path, value = paths[mutation[0] % len(paths)], mutation[1]
    (model / "tokenizer.json").write_text(json.dumps(with_value(base, path, value)))
    load(model, (path, value))


def test_a_tokenizer_that_panics_in_rust_is_a_bad_file(model):
    """A panic is no Exception: it went past every handler and ended the program."""
    path = model / "tokenizer.json"
    base = json.loads(path.read_text())
    base["model"]["continuing_subword_prefix"] = "a" * 3000
    path.write_text(json.dumps(base))
    error = load(model, "panic")
    assert error is not None and "The tokenizer of" in error


# ---- safetensors


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_safetensors(path: Path, header: Any, body: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)


DTYPES = ["F64", "F16", "I32", "I8", "U64", "BOOL", "F8_E4M3", "F4", "F6_E2M3", "C64", "f32", ""]
SIZES = st.sampled_from([0, 1, -1, 63, 64, 65, 256, 2**31, 2**62, 2**63, 2**64 - 1, 10**30])


@fuzzed(
    st.tuples(
        st.integers(0, 10**6),
        st.one_of(VALUES, st.sampled_from(DTYPES), SIZES, st.lists(SIZES, max_size=4)),
    )
)
def test_mutated_headers_load_or_are_named(tiny_model, model, mutation):
    header, body = header_of(tiny_model / "model.safetensors")
    paths = [path for name in list(header)[:4] for path in paths_of(header[name], (name,))]
    path, value = paths[mutation[0] % len(paths)], mutation[1]
    write_safetensors(model / "model.safetensors", with_value(header, path, value), body)
    load(model, (path, value))


def test_headers_that_lie_are_named(tiny_model, model):
    source, path = tiny_model / "model.safetensors", model / "model.safetensors"
    header, body = header_of(source)
    size = source.stat().st_size
    for length in (0, 1, 7, size - 8, size, 10**8, 10**8 + 1, 2**31, 2**40, 2**63 - 1, 2**64 - 1):
        write_safetensors(path, header, body, length)
        assert load(model, ("length", length)) is not None
    for end in (0, 1, 7, 8, 9, 1000, size - 1):
        path.write_bytes(source.read_bytes()[:end])
        assert load(model, ("cut", end)) is not None
    path.write_bytes(source.read_bytes() + b"x")
    assert load(model, "one byte more") is not None
    first, second = [name for name in header if name.startswith("model.layers")][:2]
    overlapping = header | {first: header[second]}
    write_safetensors(path, overlapping, body)
    assert load(model, "overlap") is not None
    for dtype, num_bytes in (("F6_E2M3", 48), ("F4", 32), ("C64", 512), ("F8_E8M0", 64)):
        fields = {"dtype": dtype, "shape": [64], "data_offsets": [0, num_bytes]}
        write_safetensors(path, {"model.norm.weight": fields}, b"\0" * num_bytes)
        assert load(model, dtype) is not None


def test_a_dtype_that_torch_does_not_have_names_file_and_tensor(model):
    fields = {"dtype": "F6_E2M3", "shape": [64], "data_offsets": [0, 48]}
    for path in model.glob("*.safetensors"):
        path.unlink()
    tensors = {"model.norm.weight": fields}
    write_safetensors(model / "model.safetensors", tensors, b"\0" * 48)
    assert tensor_shapes(model) == {"model.norm.weight": (64,)}
    error = load(model, fields)
    assert error is not None and "model.norm.weight: Dtype not understood: F6_E2M3" in error


# ---- the index

NAMES = [
    *("../x.safetensors", "/x.safetensors", "C:\\x.safetensors", "a" * 300 + ".safetensors"),
    *("\ud800.safetensors", "x\0.safetensors", "folder.safetensors", "loop.safetensors"),
    *("pipe.safetensors", "config.json", ".safetensors", "x.safetensors/", "", "SHARD.SAFETENSORS"),
]


@pytest.fixture
def sharded(tiny_model: Path, model: Path) -> Path:
    tensors = load_file(tiny_model / "model.safetensors")
    (model / "model.safetensors").unlink(missing_ok=True)
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file_name = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, model / file_name)
        weight_map.update(dict.fromkeys(part, file_name))
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (model / INDEX_NAME).write_text(json.dumps(index))
    (model / "folder.safetensors").mkdir()
    (model / "loop.safetensors").symlink_to("loop.safetensors")
    os.mkfifo(model / "pipe.safetensors")  # opening one waits for a writer
    return model


@fuzzed(st.tuples(st.integers(0, 10**6), st.one_of(VALUES, st.sampled_from(NAMES))))
def test_mutated_indexes_load_or_are_named(sharded, mutation):
    path = sharded / INDEX_NAME
    before = path.read_text()
    base = json.loads(before)
    paths = list(paths_of(base))
    place, value = paths[mutation[0] % len(paths)], mutation[1]
    path.write_text(json.dumps(with_value(base, place, value)))
    error = load(sharded, (place, value))
    path.write_text(before)
    if len(place) == 2 and value in NAMES and place[0] == "weight_map":
        assert error is not None


# ---- adapters

ADAPTER_EXTRA = (
    *(
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "use_qalora",
        "corda_config",
        "lora_bias",
    ),
    *("layer_replication", "trainable_token_indices", "unknown"),
)


@fuzzed(st.data())
def test_mutated_adapters_load_or_are_named(model, tmp_path, mutation):
    adapter = tmp_path / "adapter"
    if not adapter.exists():
        write_adapter(adapter, model)
        shutil.copy(adapter / "adapter_config.json", adapter / "whole.json")
    base = json.loads((adapter / "whole.json").read_text())
    data = mutation.draw(mutated(base, ADAPTER_EXTRA))
    (adapter / "adapter_config.json").write_text(json.dumps(data))
    try:
        load(model, data, lora=str(adapter))
    except AssertionError as error:
        # An adapter's fault is named by the adapter's directory.
        if str(adapter) not in str(error):
            raise


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_alpha": 1e38}, "lora_alpha must be a finite number"),  # infinite weights, then NaN
        ({"alpha_pattern": {"q_proj": 1e308}}, r"alpha_pattern\['q_proj'\] must be a finite"),
        ({"target_modules": r"([a-z._0-9]+)+x"}, "target_modules has .* repeats a group"),
        ({"rank_pattern": {r"((\w|\.)*)*x": 4}}, "rank_pattern has .* repeats a group"),
        ({"target_modules": r"(.|.)*!"}, "target_modules has .* repeats a group"),
        ({"target_modules": r"(.?){60}!"}, "target_modules has .* repeats a group"),
        ({"target_modules": ".*" * 9 + "x"}, "target_modules has .* with 9 repeats and 0 groups"),
        ({"exclude_modules": ".?" * 40 + "x"}, "exclude_modules has .* with 40 repeats"),
        ({"alpha_pattern": {"(.|.)" * 40: 1}}, "alpha_pattern has .* 0 repeats and 40 groups"),
    ],
    ids=str,
)
def test_adapters_that_would_overflow_or_hang_are_refused(model, tmp_path, changes, words):
    adapter = write_adapter(tmp_path / "adapter", model)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=f"{adapter}/adapter_config.json: {words}"):
        LLM(model, **OPTIONS, lora=str(adapter))
