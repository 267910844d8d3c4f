"""The model of lm-evaluation-harness against the harness's own `hf` model, on local tasks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[lm-eval]'")
pytest.importorskip("accelerate", reason="lm-eval's hf model needs accelerate")

TASKS = Path(__file__).parent / "lm_eval_tasks"
CHOICE, GENERATE, TEXTS = "nanovllm_sums_choice", "nanovllm_sums_generate", "nanovllm_texts"


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    """Tasks name their data relative to their folder; nothing is fetched."""
    before = Path.cwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        os.chdir(TASKS)
        yield
        os.chdir(before)


def evaluate(model, model_args, tasks, **options):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    import nanovllm.lm_eval  # noqa: F401  # registers the model

    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    return simple_evaluate(
        model=model,
        model_args=model_args,
        tasks=tasks,
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=True,
        random_seed=None,
        **options,
    )


def both(demo_model, tasks, model_args=None, **options):
    shared = {"pretrained": str(demo_model), "dtype": "float32", **(model_args or {})}
    theirs = evaluate("hf", shared, tasks, batch_size=4, device="cpu", **options)
    engine = {"num_kvcache_blocks": 64, "max_num_batched_tokens": 300}
    ours = evaluate("nanovllm", {**shared, **engine}, tasks, device="cpu", **options)
    return ours, theirs


def metrics(results, task):
    values = results["results"][task].items()
    return {name: value for name, value in values if isinstance(value, float)}


def responses(results, task):
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [sample["filtered_resps"] for sample in samples]


def test_scores_equal_those_of_the_hf_model(demo_model):
    # Windows of 40 tokens: the long text is rolled over.
    ours, theirs = both(demo_model, [CHOICE, GENERATE, TEXTS], {"max_length": 40})
    for task in (CHOICE, GENERATE, TEXTS):
        found, expected = metrics(ours, task), metrics(theirs, task)
        assert found.keys() == expected.keys() and found
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-3), (task, name)
    assert metrics(ours, CHOICE)["acc,none"] > 0.9, "the demo model knows sums"
    assert metrics(ours, GENERATE)["exact_match,none"] > 0.9
    for mine, other in zip(responses(ours, CHOICE), responses(theirs, CHOICE), strict=True):
        for (logprob, is_greedy), (their_logprob, their_greedy) in zip(mine, other, strict=True):
            assert float(logprob) == pytest.approx(float(their_logprob), abs=1e-3)
            assert str(is_greedy) == str(their_greedy)
    assert responses(ours, GENERATE) == responses(theirs, GENERATE)


def test_scores_with_the_chat_template_and_examples_equal_those_of_the_hf_model(demo_model):
    ours, theirs = both(
        demo_model, [CHOICE, GENERATE], apply_chat_template=True, num_fewshot=0, limit=8
    )
    for task in (CHOICE, GENERATE):
        assert metrics(ours, task) == pytest.approx(metrics(theirs, task), rel=1e-3)
    assert responses(ours, GENERATE) == responses(theirs, GENERATE)
    prompt = ours["samples"][GENERATE][0]["arguments"]
    assert "<|im_start|>user" in str(prompt)


def test_the_command_line_knows_the_model(demo_model, tmp_path):
    command = [
        sys.executable, "-m", "nanovllm.lm_eval", "--model", "nanovllm",
        "--model_args", f"pretrained={demo_model},device=cpu,num_kvcache_blocks=32",
        "--include_path", str(TASKS), "--tasks", GENERATE, "--limit", "4",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=TASKS, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "exact_match" in done.stdout and "nanovllm_sums_generate" in done.stdout
