"""Paths are those of the moment when they were given, and bad ones are named."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from lora_adapters import write_adapter

import nanovllm.batch
from nanovllm import LLM, SamplingParams
from nanovllm.batch import BatchOptions, run_batch
from nanovllm.config import Config

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
OPTIONS = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 16}


@pytest.fixture
def place(tmp_path, tiny_model, monkeypatch):
    """The current directory, with a model and an adapter, and another one to go to."""
    shutil.copytree(tiny_model, tmp_path / "here" / "model")
    (tmp_path / "here" / "model" / "generation_config.json").write_text('{"temperature": 0.25}')
    write_adapter(tmp_path / "here" / "adapter", tiny_model)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_an_engine_does_not_depend_on_the_current_directory(place):
    """It once read defaults and weights from wherever the program had gone."""
    with LLM("model", lora="adapter", tokenizer="model/../model", **OPTIONS) as llm:
        before = llm.generate([[5, 6]], GREEDY, use_tqdm=False)[0]["token_ids"]
        os.chdir(place / "elsewhere")
        assert llm.get_default_sampling_params().temperature == 0.25
        llm.sleep(2)
        llm.wake_up()
        assert llm.generate([[5, 6]], GREEDY, use_tqdm=False)[0]["token_ids"] == before


def test_what_stands_behind_a_link_is_found_by_its_parent(place):
    """`link/..` was struck out of paths, and is not where the link stands."""
    (place / "elsewhere" / "deep").mkdir()
    os.symlink(place / "elsewhere" / "deep", "link")
    os.rename("model", place / "elsewhere" / "model")
    shutil.move("adapter", place / "elsewhere")
    (place / "elsewhere" / "in.jsonl").write_text('{"prompt": "hello", "max_tokens": 2}\n')
    options = BatchOptions("link/../in.jsonl", "link/../out.jsonl", show_progress=False)
    adapter = "link/../adapter"
    assert run_batch("link/../model", options, lora=adapter, **OPTIONS).exit_code == 0
    assert (place / "elsewhere" / "out.jsonl").is_file()


def test_a_job_does_not_depend_on_the_current_directory(place, monkeypatch):
    Path("in.jsonl").write_text('{"prompt": "hello", "max_tokens": 2}\n')
    real = nanovllm.batch.open_llm

    def make_and_go(*args):
        os.chdir(place / "elsewhere")
        return real(*args)

    monkeypatch.setattr(nanovllm.batch, "open_llm", make_and_go)
    files = {"metrics": "m.json", "report": Path("r.html"), "trace": "t.json"}
    options = BatchOptions("in.jsonl", "out.jsonl", show_progress=False, **files)
    assert run_batch("model", options, lora="adapter", **OPTIONS).exit_code == 0
    assert os.listdir(place / "elsewhere") == []
    left = {"adapter", "model", "in.jsonl", "out.jsonl", "out.jsonl.job.json"}
    assert set(os.listdir(place / "here")) == left | {"m.json", "r.html", "t.json"}


def test_results_name_the_model_as_it_was_given(place):
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    Path("in.jsonl").write_text(json.dumps({**line, "body": {"prompt": "a", "max_tokens": 2}}))
    run_batch("model", BatchOptions("in.jsonl", "out.jsonl", show_progress=False), **OPTIONS)
    assert json.loads(Path("out.jsonl").read_text())["response"]["body"]["model"] == "model"


def test_directories_become_absolute_and_hub_ids_stay(place, monkeypatch):
    monkeypatch.setenv("HOME", str(place / "here"))
    here = str(place / "here")
    config = Config("model", tokenizer="./model", lora="adapter")
    assert config.model == config.tokenizer == f"{here}/model"
    assert config.lora == f"{here}/adapter"
    assert Config("~/model").model == f"{here}/model"
    assert Config("some/model", tokenizer="no-such").model == "some/model"
    options = BatchOptions("in.jsonl", Path("out.jsonl"), report="r.html")
    assert options.input == f"{here}/in.jsonl"
    assert (options.output, options.report) == (Path(here, "out.jsonl"), Path(here, "r.html"))
    assert BatchOptions("-", "o").input == "-"
    options = BatchOptions("~/in.jsonl", "~/out.jsonl", trace="~/t.json", metrics=Path("~/m.json"))
    assert options.input == f"{here}/in.jsonl"
    assert (options.output, options.trace) == (Path(here, "out.jsonl"), Path(here, "t.json"))
    assert options.metrics == Path(here, "m.json")


def test_a_tokenizer_that_is_not_there_is_named_as_one(tiny_model):
    """It was called the model, which was right."""
    with pytest.raises(ValueError, match="^tokenizer '/no/such' is no directory"):
        LLM(tiny_model, tokenizer="/no/such", **OPTIONS)


def test_an_adapter_in_the_models_place_and_its_file_are_told(place):
    """One was told to lack a config.json, the other was the operating system's error."""
    with pytest.raises(ValueError, match="This one is an adapter: pass it as lora, with its base"):
        LLM("adapter", **OPTIONS)
    with pytest.raises(ValueError, match="adapter_model.safetensors' is not a directory. It must"):
        LLM("model", lora="adapter/adapter_model.safetensors", **OPTIONS)


BAD = ["x" * 5000, "/" + "y/" * 3000, "a\0b", "\ud800", ""]


@pytest.mark.parametrize("path", BAD, ids=["long name", "long path", "NUL", "surrogate", "empty"])
@pytest.mark.parametrize(
    "name", ["model", "tokenizer", "lora", "input", "output", "metrics", "report", "trace"]
)
def test_a_path_that_no_file_can_have_is_named(tiny_model, tmp_path, name, path):
    with pytest.raises(ValueError, match=name) as caught:
        if name in ("model", "tokenizer", "lora"):
            arguments = {"model": tiny_model, name: path}
            LLM(arguments.pop("model"), **arguments, **OPTIONS)
        else:
            files = {"input": "-", "output": tmp_path / "o", name: path}
            BatchOptions(files.pop("input"), files.pop("output"), **files)
    assert len(str(caught.value)) < 600
    str(caught.value).encode()  # can be shown


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"window": True}, TypeError, "window must be an int, got True"),
        ({"window": 2.0}, TypeError, "window must be an int, got 2.0"),
        ({"shard": (3, 3)}, ValueError, r"shard must be \(i, n\) with i from 0 to n-1"),
        ({"shard": (0.0, 3)}, TypeError, r"shard\[0\] must be an int"),
        ({"shard": (-1, 3)}, ValueError, r"shard\[0\] must be at least 0"),
        ({"shard": "0/3"}, TypeError, r"shard must be \(i, n\).*got '0/3'"),
        ({"fsync_interval_s": -1}, ValueError, "fsync_interval_s must be a finite number"),
        ({"fsync_interval_s": "5"}, TypeError, "fsync_interval_s must be a number"),
        ({"overwrite": "no"}, TypeError, "overwrite must be True or False, got 'no'"),
        ({"force_resume": 1}, TypeError, "force_resume must be True or False"),
        ({"show_progress": None}, TypeError, "show_progress must be True or False"),
        ({"overwrite": True, "retry_failed": True}, ValueError, "starts anew and retry_failed="),
        ({"overwrite": True, "force_resume": True}, ValueError, "starts anew and force_resume="),
        ({"report": 3}, TypeError, "report must be a path, got 3"),
        ({"output": "-"}, ValueError, "output must be a file"),
    ],
    ids=str,
)
def test_options_of_a_job_are_checked_when_they_are_made(options, error, match):
    with pytest.raises(error, match=match):
        BatchOptions(**{"input": "-", "output": "o", **options})


def test_the_number_of_engines_of_a_job_is_a_number(tiny_model, tmp_path):
    options = BatchOptions("-", tmp_path / "o")
    for value in (True, "2", 1.0):
        with pytest.raises(TypeError, match="data_parallel_size must be an int"):
            run_batch(tiny_model, options, data_parallel_size=value)
