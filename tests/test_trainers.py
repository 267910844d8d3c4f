"""What RL trainers need: weights replaced in place, memory lent, logprobs of what was drawn."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from lora_adapters import write_adapter
from oracle import Oracle
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_qwen3

from nanovllm import LLM, SamplingParams
from nanovllm.frontend.weight_update import replace_weights

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5 + i, *range(30, 60)] for i in range(3)] + [[7, 8]]
NORM, HEAD = "model.norm.weight", "lm_head.weight"
Q, GATE = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.gate_proj.weight"


class Spread(torch.Tensor):
    """A tensor of which each rank has a part, as torch.distributed's DTensor."""

    def full_tensor(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    return write_tiny_qwen3(tmp_path_factory.mktemp("other") / "model", seed=1)


@pytest.fixture(scope="module")
def other_weights(other_model):
    return load_file(other_model / "model.safetensors")


@pytest.fixture(scope="module")
def other_oracle(other_model):
    return Oracle(other_model)


def check(llm, oracle) -> None:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        oracle.check_greedy(prompt, output["token_ids"])


def parameters_of(llm) -> dict[str, torch.Tensor]:
    model = llm._engine._executor._runner._model
    return {name: tensor.clone() for name, tensor in model.named_parameters()}


@pytest.mark.parametrize("tp_size", [1, 2])
def test_weights_and_memory_of_a_live_engine(
    tiny_llm, tiny_oracle, other_weights, other_oracle, tp_size
):
    """One engine through all of it, since two processes take seconds to start."""
    llm = tiny_llm(tensor_parallel_size=tp_size)
    check(llm, tiny_oracle)

    # New weights, fused and sharded inside; cached prefixes are those of the old ones.
    llm.load_weights(other_weights.items())
    check(llm, other_oracle)
    assert llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)[0].num_cached_tokens == 16

    # A part: the old ones, one after another.
    old = load_file(llm._engine.model_dir / "model.safetensors")
    for name, tensor in old.items():
        llm.load_weights([(name, tensor)])
    check(llm, tiny_oracle)

    # What is wrong is named, and nothing is changed by what stood before it.
    before = parameters_of(llm)
    good = (NORM, other_weights[NORM])
    for bad, error, match in [
        (("model.nothing", other_weights[NORM]), ValueError, "1 unexpected: model.nothing"),
        ((Q, other_weights[Q][:, :-1]), ValueError, rf"{Q}: .*shape \(128, 63\) does not fit"),
        ((GATE, other_weights[GATE][1:]), ValueError, f"{GATE}: .*shape"),
        ((HEAD, other_weights[HEAD].int()), ValueError, f"{HEAD}: .*dtype torch.int32"),
        (good, ValueError, f"1 duplicate: {NORM}"),
        ((HEAD, [1.0]), TypeError, r"\(name, tensor\) pairs, got \(str, list\) at 1"),
        ("abc", TypeError, "pairs, got 'abc' at 1"),
        ((HEAD, other_weights[HEAD].to("meta")), ValueError, f"{HEAD} is on the meta device"),
        ((HEAD, other_weights[HEAD].to_sparse()), ValueError, f"{HEAD} is torch.sparse_coo"),
        ((HEAD, other_weights[HEAD].as_subclass(Spread)), ValueError, f"{HEAD} is a DTensor"),
    ]:
        with pytest.raises(error, match=match):
            llm.load_weights([good, bad])
    after = parameters_of(llm)
    assert all(torch.equal(before[name], after[name]) for name in before)
    check(llm, tiny_oracle)

    # Not while requests are open.
    request_id = llm.add_request(PROMPTS[0], GREEDY)
    for call in (
        lambda: llm.load_weights([good]),
        llm.reset_prefix_cache,
        lambda: llm.sleep(1),
        lambda: llm.sleep(2),
    ):
        with pytest.raises(RuntimeError, match=r"needs an idle engine: 1 request\(s\) are open"):
            call()
    # Another call brings it to its end; its output still waits for `step`.
    llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)
    with pytest.raises(RuntimeError, match=r"needs an idle engine: 1 request\(s\) are open"):
        llm.sleep(1)
    llm.abort(request_id)

    # Asleep, and awake again; level 2 reads the checkpoint.
    llm.load_weights(other_weights.items())
    runner = llm._engine._executor._runner
    cache_bytes = runner._kv_cache.untyped_storage().nbytes()
    weight_bytes = sum(p.untyped_storage().nbytes() for p in runner._model.parameters())
    assert cache_bytes > 0 and weight_bytes > 0
    for level in (1, 2):
        llm.sleep(level)
        left = sum(p.untyped_storage().nbytes() for p in runner._model.parameters())
        assert runner._kv_cache.untyped_storage().nbytes() == 0
        assert left == (weight_bytes if level == 1 else 0)
        with pytest.raises(RuntimeError, match="sleeps. Call wake_up first"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        with pytest.raises(RuntimeError, match="sleeps. Call wake_up first"):
            llm.load_weights([good])
        llm.wake_up()
        assert runner._kv_cache.untyped_storage().nbytes() == cache_bytes
        check(llm, other_oracle if level == 1 else tiny_oracle)
    llm.sleep(1)
    llm.sleep(2)  # deeper
    llm.sleep(1)  # as it is
    assert sum(p.untyped_storage().nbytes() for p in runner._model.parameters()) == 0
    llm.wake_up()
    llm.wake_up()
    check(llm, tiny_oracle)
    with pytest.raises(ValueError, match="level must be from 1 to 2, got 3"):
        llm.sleep(3)
    llm._engine.scheduler.check_invariants()


def test_a_reset_forgets_cached_prefixes(tiny_llm):
    """Row 33: what the cache holds must not outlive what it was computed with."""
    llm = tiny_llm()
    llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    assert llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)[0].num_cached_tokens == 16
    llm.reset_prefix_cache()
    assert llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_weights_from_a_generator_on_half_precision_tensors(tiny_llm, other_weights):
    llm = tiny_llm()
    halves = {name: tensor.bfloat16() for name, tensor in other_weights.items()}
    llm.load_weights((name, tensor) for name, tensor in halves.items())
    norm = parameters_of(llm)[NORM]
    assert norm.dtype == torch.float32 and torch.equal(norm, halves[NORM].float())


def test_tied_weights_must_agree(make_llm, tmp_path):
    directory = write_tiny_qwen3(tmp_path / "tied", tie_word_embeddings=True)
    llm = make_llm(directory, device="cpu", dtype="float32", num_kvcache_blocks=32)
    table = torch.randn(517, 64)
    embedding = "model.embed_tokens.weight"
    before = parameters_of(llm)
    with pytest.raises(ValueError, match="lm_head.weight and model.embed_tokens.weight differ"):
        llm.load_weights([(embedding, table), (HEAD, table + 1)])
    assert all(torch.equal(before[name], now) for name, now in parameters_of(llm).items())
    llm.load_weights([(embedding, table), (HEAD, table.clone())])
    assert torch.equal(parameters_of(llm)[embedding], table)


def test_logprobs_belong_to_the_tokens_one_to_one(tiny_llm):
    llm = tiny_llm(max_num_seqs=4, num_kvcache_blocks=24, enable_overlap=True)
    params = SamplingParams(
        n=3, temperature=1.2, seed=4, max_tokens=24, logprobs=0, stop=["e", "a"], min_tokens=2
    )
    reasons = set()
    for output in llm.generate(PROMPTS * 3, params, use_tqdm=False):
        for completion in output.outputs:
            reasons.add(completion.finish_reason)
            assert len(completion.logprobs) == len(completion.token_ids)
            pairs = zip(completion.logprobs, completion.token_ids, strict=True)
            values = [position[token].logprob for position, token in pairs]
            assert completion.cumulative_logprob == pytest.approx(sum(values))
    assert reasons == {"stop", "length"}


def test_facts_a_trainer_asks_for(tiny_llm):
    llm = tiny_llm(max_model_len=128)
    assert llm.max_model_len == 128
    assert llm.get_tokenizer().decode(llm.get_tokenizer().encode("hello")) == "hello"


def test_a_wake_up_that_fails_is_done_again_from_the_beginning(tmp_path, tiny_model, tiny_oracle):
    """The second try once took memory that nobody had filled for weights."""
    directory = tmp_path / "model"
    shutil.copytree(tiny_model, directory)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(directory, device="cpu", dtype="float32", num_kvcache_blocks=16) as llm:
        llm.sleep(2)
        (directory / "model.safetensors").rename(tmp_path / "away")
        with pytest.raises(ValueError, match="no weights in"):
            llm.wake_up()
        with pytest.raises(RuntimeError, match="sleeps"):
            llm.generate([[5, 6]], params, use_tqdm=False)
        (tmp_path / "away").rename(directory / "model.safetensors")
        llm.wake_up()
        (output,) = llm.generate([[5, 6]], params, use_tqdm=False)
        tiny_oracle.check_greedy([5, 6], output["token_ids"])


@pytest.mark.parametrize("name", ["model/model.safetensors", "adapter/adapter_model.safetensors"])
def test_files_that_changed_are_not_taken_for_those_of_the_start(tmp_path, tiny_model, name):
    """A new adapter was once merged under the old one's digest, which names prefixes and jobs."""
    shutil.copytree(tiny_model, tmp_path / "model")
    write_adapter(tmp_path / "adapter", tiny_model)
    path = tmp_path / name
    options = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 16}
    with LLM(tmp_path / "model", lora=tmp_path / "adapter", **options) as llm:
        expected = [out["token_ids"] for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        shutil.copy2(path, tmp_path / "kept")
        llm.sleep(1)
        save_file({key: 2 * tensor for key, tensor in load_file(path).items()}, path)
        llm.wake_up()  # nothing is read
        llm.sleep(2)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"{path} changed since this LLM read it. Put"):
                llm.wake_up()
            with pytest.raises(RuntimeError, match="The engine sleeps"):
                llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        shutil.copy2(tmp_path / "kept", path)
        (path.parent / "other.safetensors").write_bytes(path.read_bytes())
        if "model/" in name:
            with pytest.raises(RuntimeError, match="other.safetensors changed"):
                llm.wake_up()
        (path.parent / "other.safetensors").unlink()
        llm.wake_up()
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [output["token_ids"] for output in outputs] == expected


def test_files_that_weights_are_not_read_from_may_change(tmp_path, tiny_model):
    """A trainer that saved its optimiser beside the model kept it from being woken up."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    names = load_file(model / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with LLM(model, device="cpu", dtype="float32", num_kvcache_blocks=16) as llm:
        expected = [out["token_ids"] for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        llm.sleep(2)
        save_file({"step": torch.ones(1)}, model / "optimizer.safetensors")
        llm.wake_up()
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [output["token_ids"] for output in outputs] == expected
        llm.sleep(2)
        (model / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        with pytest.raises(RuntimeError, match="index.json changed since"):
            llm.wake_up()


def test_new_weights_that_fail_half_way_leave_no_old_prefixes(tiny_model, monkeypatch):
    with LLM(tiny_model, device="cpu", dtype="float32", num_kvcache_blocks=64) as llm:
        prompt = list(range(5, 150))
        params = SamplingParams(temperature=0, max_tokens=2)
        llm.generate([prompt], params, use_tqdm=False)
        name = "model.norm.weight"
        model = llm._engine._executor._runner._model
        weight = dict(model.named_parameters())[name].detach().clone()
        monkeypatch.setattr(
            llm._engine._executor._runner, "calibrate", lambda: 1 / 0, raising=False
        )
        with pytest.raises(ZeroDivisionError):
            llm.load_weights([(name, weight * 2)])
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert output.num_cached_tokens == 0


def test_weights_whose_iterable_uses_the_engine_are_not_mixed_into_its_answers(tiny_llm):
    """The iterable is read first; what it left open is told, and no weight has changed."""
    llm = tiny_llm()
    before = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    name = "model.norm.weight"

    def weights():
        llm.add_request([1, 2, 3], GREEDY)
        yield name, torch.zeros(llm._engine._executor._runner._model.config.hidden_size)

    with pytest.raises(RuntimeError, match="load_weights needs an idle engine"):
        llm.load_weights(weights())
    outputs = []
    while not llm.is_finished():
        outputs += llm.step()
    assert outputs[0].outputs[0].token_ids == before


def test_float8_for_several_ranks_is_refused_before_anything_is_sent():
    weights = [("a.weight", torch.zeros(2, 2).to(torch.float8_e4m3fn))]
    with pytest.raises(ValueError, match="a.weight is torch.float8_e4m3fn.*pass it as bfloat16"):
        replace_weights(None, weights, 2)
