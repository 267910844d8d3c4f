"""Checkpoints on disk: what is read, and how incomplete or strange ones are refused."""

import json
import logging

import pytest
import torch
from model_harness import build
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_qwen3

from nanovllm.models.model_config import load_model_config
from nanovllm.utils.loader import INDEX_NAME, copy_weight, iterate_safetensors, load_model

A, B = torch.arange(6.0).view(2, 3), torch.ones(4, dtype=torch.bfloat16)


def make_model(model_dir):
    return build(load_model_config(model_dir))


def write_sharded(directory, weight_map=None):
    save_file({"a": A}, directory / "x-00001-of-00002.safetensors")
    save_file({"b": B}, directory / "x-00002-of-00002.safetensors")
    weight_map = weight_map or {
        "a": "x-00001-of-00002.safetensors",
        "b": "x-00002-of-00002.safetensors",
    }
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def read(directory):
    return dict(iterate_safetensors(directory))


def assert_a_and_b(directory):
    tensors = read(directory)
    assert sorted(tensors) == ["a", "b"]
    assert torch.equal(tensors["a"], A)
    assert torch.equal(tensors["b"], B)


def test_single_file_is_read(tmp_path):
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    assert_a_and_b(tmp_path)


def test_index_is_followed(tmp_path):
    write_sharded(tmp_path)
    assert_a_and_b(tmp_path)


def test_float64_is_read_as_it_is_and_cast_by_the_model(tmp_path):
    wide = A.double() / 3
    save_file({"a": wide}, tmp_path / "model.safetensors")
    assert read(tmp_path)["a"].dtype is torch.float64
    target = torch.empty(A.shape)
    copy_weight(target, wide)
    assert torch.equal(target, wide.float())


def test_shards_without_index_are_read(tmp_path):
    write_sharded(tmp_path)
    (tmp_path / INDEX_NAME).unlink()
    assert_a_and_b(tmp_path)


def test_files_that_are_links_are_read(tmp_path):
    """Hugging Face's cache is made of symbolic links that leave the directory."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    write_sharded(blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert_a_and_b(snapshot)


def test_hidden_files_are_left_alone(tmp_path):
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    (tmp_path / "._model.safetensors").write_bytes(b"what macOS writes beside a copy")
    assert_a_and_b(tmp_path)


def test_index_decides_which_of_two_copies_counts(tmp_path):
    write_sharded(tmp_path)
    save_file({"a": A, "b": B * 2}, tmp_path / "x-00001-of-00002.safetensors")
    assert_a_and_b(tmp_path)


def test_tensors_the_index_forgot_are_read_too(tmp_path):
    write_sharded(tmp_path)
    save_file({"a": A, "c": A.clone()}, tmp_path / "x-00001-of-00002.safetensors")
    assert sorted(read(tmp_path)) == ["a", "b", "c"]


def test_empty_directory_says_what_was_looked_for(tmp_path):
    message = r"looked for model.safetensors.index.json and \*.safetensors, found an empty"
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


def test_absent_directory_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere is not a directory"):
        read(tmp_path / "nowhere")


def test_pickles_are_never_read_and_conversion_is_explained(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": A}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"config.json, pytorch_model.bin.*save_pretrained"):
        read(tmp_path)


def test_missing_shard_is_named(tmp_path):
    write_sharded(tmp_path)
    (tmp_path / "x-00002-of-00002.safetensors").unlink()
    message = "x-00002-of-00002.safetensors. Incomplete download"
    with pytest.raises(ValueError, match=message):
        read(tmp_path)
    (tmp_path / INDEX_NAME).unlink()
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


def test_dangling_link_is_a_missing_shard(tmp_path):
    write_sharded(tmp_path)
    path = tmp_path / "x-00002-of-00002.safetensors"
    path.unlink()
    path.symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match="lacks 1 shard files: x-00002"):
        read(tmp_path)


def test_tensor_absent_from_its_shard_is_named(tmp_path):
    write_sharded(tmp_path)
    save_file({"z": B}, tmp_path / "x-00002-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"lists 1 tensors .*b \(x-00002-of-00002.safetensors\)"):
        read(tmp_path)


def test_tensor_in_two_files_is_refused_without_index(tmp_path):
    save_file({"a": A}, tmp_path / "model.safetensors")
    save_file({"a": A}, tmp_path / "copy.safetensors")
    with pytest.raises(ValueError, match="'a' is in two files .*copy.safetensors and model"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["consolidated.safetensors", "adapter_model.safetensors"])
def test_what_is_no_part_of_the_model_is_left_alone(tmp_path, name):
    """Mistral ships its weights in two forms, and trainers save adapters beside the model."""
    save_file({"a": A}, tmp_path / "model.safetensors")
    save_file({"layers.0.wq": B}, tmp_path / name)
    assert read(tmp_path).keys() == {"a"}
    (tmp_path / "model.safetensors").unlink()
    assert read(tmp_path).keys() == {"layers.0.wq"}


def test_single_file_beside_a_foreign_index_is_ambiguous(tmp_path):
    write_sharded(tmp_path)
    save_file({"a": A * 2, "b": B}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="both model.safetensors and .*index.json"):
        read(tmp_path)


@pytest.mark.parametrize(
    "file_name",
    [
        "../x.safetensors",
        "sub/../../x.safetensors",
        "..\\x.safetensors",
        "/etc/x.safetensors",
        "C:\\x.safetensors",
        "pytorch_model.bin",
        "x.safetensors\0",
        "x\0.safetensors",
        "",
        3,
        None,
    ],
)
def test_index_cannot_lead_outside(tmp_path, file_name):
    inner = tmp_path / "model"
    inner.mkdir()
    save_file({"a": A}, tmp_path / "x.safetensors")
    (inner / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": file_name}}))
    with pytest.raises(ValueError, match=r"weight_map\['a'\] must be the name of a .safetensors"):
        read(inner)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000, "\x00"],
    ids=["empty", "cut", "list", "bare", "wrong type", "no tensors", "deep", "binary"],
)
def test_broken_index_is_named(tmp_path, content):
    (tmp_path / INDEX_NAME).write_text(content)
    with pytest.raises(ValueError, match=INDEX_NAME):
        read(tmp_path)


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"", "download complete"),
        (b"\xff" * 16, "download complete"),
        (b"\x10\0\0\0\0\0\0\0" + b"not json at all!", "download complete"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
    ids=["empty", "huge header", "bad header", "lfs"],
)
def test_unreadable_file_is_named(tmp_path, content, hint):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path}/model.safetensors is not .*{hint}"):
        read(tmp_path)


def test_cut_file_is_refused_before_anything_is_yielded(tmp_path):
    write_sharded(tmp_path)
    path = tmp_path / "x-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="x-00002-of-00002.safetensors is not a readable"):
        next(iterate_safetensors(tmp_path))


def test_load_logs_size_and_time(tmp_path, caplog):
    write_tiny_qwen3(tmp_path)
    model = make_model(tmp_path)
    with caplog.at_level(logging.INFO, logger="nanovllm"):
        load_model(model, tmp_path)
    assert [r.getMessage() for r in caplog.records if "GB of weights in" in r.getMessage()]


def test_sharded_and_single_checkpoint_load_alike(tmp_path):
    one = make_model(write_tiny_qwen3(tmp_path / "one"))
    many = make_model(write_tiny_qwen3(tmp_path / "many", max_shard_size="100KB"))
    assert (tmp_path / "many" / INDEX_NAME).is_file()
    load_model(one, tmp_path / "one")
    load_model(many, tmp_path / "many")
    for a, b in zip(one.parameters(), many.parameters(), strict=True):
        assert torch.equal(a, b)


def rewrite(model_dir, change):
    tensors = load_file(model_dir / "model.safetensors")
    change(tensors)
    save_file(tensors, model_dir / "model.safetensors")


def test_missing_and_unexpected_tensors_are_listed(tmp_path):
    """A checkpoint with a lost tensor booted normally and wrote garbage."""
    write_tiny_qwen3(tmp_path)

    def change(tensors):
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        del tensors["lm_head.weight"]
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(1)

    rewrite(tmp_path, change)
    message = (
        "2 missing: lm_head.weight, model.layers.1.self_attn.k_proj.weight; "
        "1 unexpected: model.layers.2.mlp.up_proj.weight.*download complete"
    )
    with pytest.raises(ValueError, match=message) as raised:
        load_model(make_model(tmp_path), tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_long_lists_are_cut(tmp_path):
    write_tiny_qwen3(tmp_path)
    with pytest.raises(ValueError, match=r"25 missing: (\S+, ){9}\S+ and 15 more"):
        make_model(tmp_path).load_weights([])


def test_duplicate_names_are_refused(tmp_path):
    write_tiny_qwen3(tmp_path)
    tensors = [*iterate_safetensors(tmp_path)]
    with pytest.raises(ValueError, match="1 duplicate: lm_head.weight"):
        make_model(tmp_path).load_weights([*tensors, ("lm_head.weight", tensors[0][1])])


def test_wrong_shape_names_tensor_and_both_shapes(tmp_path):
    write_tiny_qwen3(tmp_path)
    name = "model.layers.0.self_attn.k_proj.weight"
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.zeros(64, 32)}))
    with pytest.raises(ValueError, match=rf"{name}: .*\(64, 32\) .*\(64, 64\)"):
        load_model(make_model(tmp_path), tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_not_just_cast(tmp_path, dtype):
    write_tiny_qwen3(tmp_path)
    rewrite(
        tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64).to(dtype)})
    )
    with pytest.raises(ValueError, match=f"model.norm.weight: .*{dtype} is not supported"):
        load_model(make_model(tmp_path), tmp_path)


def test_old_rotary_tables_are_skipped(tmp_path):
    write_tiny_qwen3(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.ones(16)}))
    load_model(make_model(tmp_path), tmp_path)


def test_tied_checkpoint_may_repeat_the_head(tmp_path):
    write_tiny_qwen3(tmp_path, tie_word_embeddings=True)
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": table.clone()}))
    model = make_model(tmp_path)
    load_model(model, tmp_path)
    assert torch.equal(model.lm_head.weight, table)


def test_tied_checkpoint_may_have_only_the_head(tmp_path):
    write_tiny_qwen3(tmp_path, tie_word_embeddings=True)
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]

    def change(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    rewrite(tmp_path, change)
    model = make_model(tmp_path)
    load_model(model, tmp_path)
    assert torch.equal(model.model.embed_tokens.weight, table)


def test_tied_config_with_another_head_is_refused(tmp_path):
    write_tiny_qwen3(tmp_path, tie_word_embeddings=True)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(517, 64)}))
    with pytest.raises(ValueError, match="tie_word_embeddings = true, but lm_head.weight and"):
        load_model(make_model(tmp_path), tmp_path)


def test_tied_checkpoint_without_either_misses_the_embedding(tmp_path):
    write_tiny_qwen3(tmp_path, tie_word_embeddings=True)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    with pytest.raises(ValueError, match="1 missing: model.embed_tokens.weight"):
        load_model(make_model(tmp_path), tmp_path)


def test_weights_are_replaced_in_place_and_in_part(tmp_path):
    """CUDA graphs hold the addresses; reinforcement learning sends weights in buckets."""
    write_tiny_qwen3(tmp_path)
    model = make_model(tmp_path)
    load_model(model, tmp_path)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    name = "model.layers.1.mlp.up_proj.weight"
    gate_before = model.model.layers[1].mlp.gate_up_proj.weight[:96].clone()
    update = torch.full((96, 64), 0.25)
    with pytest.raises(ValueError, match="24 missing"):
        model.load_weights([(name, update)])
    model.load_weights([(name, update)], partial=True)
    with pytest.raises(ValueError, match="1 unexpected: nope"):
        model.load_weights([("nope", update)], partial=True)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    fused = model.model.layers[1].mlp.gate_up_proj.weight
    assert torch.equal(fused[96:], update)
    assert torch.equal(fused[:96], gate_before)
