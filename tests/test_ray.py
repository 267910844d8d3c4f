"""Ray Data on a local cluster of CPU actors; skipped where ray is not installed."""

import os
import signal
import time
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="needs pip install -e .[ray]")
pytest.importorskip("ray.data", reason="needs pip install -e .[ray]")

from nanovllm.ray import build_processor  # noqa: E402  # after the skips

ROOT = Path(__file__).parent.parent
MODEL = str(ROOT / "tests" / "tiny-qwen3")
ENGINE = {"device": "cpu", "dtype": "float32", "cpu_kvcache_space_gib": 0.05, "max_num_seqs": 8}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def actor_pids() -> list[int]:
    """Processes that Ray runs our class in."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if name.startswith(b"ray::") and b"RowGenerator" in name:
                found.append(int(entry.name))
    return found


def sums(num_rows: int) -> list[dict]:
    return [{"row": i, "prompt": f"{i % 90 + 10}+{i % 9}="} for i in range(num_rows)]


def test_rows_keep_their_columns_and_bad_ones_have_a_reason():
    rows = [*sums(6), {"row": 6, "prompt": ""}, {"row": 7, "prompt": "x" * 40000}]
    processor = build_processor(
        MODEL, sampling={"temperature": 0, "max_tokens": 8}, batch_size=4, **ENGINE
    )
    result = sorted(processor(ray.data.from_items(rows)).take_all(), key=lambda row: row["row"])
    assert [row["row"] for row in result] == list(range(8))
    assert [row["output"] for row in result[:3]] == ["10", "12", "14"]
    assert all(row["output_error"] is None for row in result[:6])
    assert "empty" in result[6]["output_error"] and result[6]["output"] is None
    assert "max_model_len" in result[7]["output_error"]


def test_conversations_are_laid_out_by_the_template():
    rows = [
        {"id": "a", "messages": [{"role": "user", "content": "12+34="}]},
        {"id": "b", "messages": []},
    ]
    processor = build_processor(
        MODEL,
        messages_column="messages",
        id_column="id",
        sampling={"temperature": 0, "max_tokens": 8},
        **ENGINE,
    )
    result = {row["id"]: row for row in processor(ray.data.from_items(rows)).take_all()}
    assert result["a"]["output"] == "46"
    assert "messages must be a list" in result["b"]["output_error"]


def test_a_bad_option_is_refused_before_anything_starts():
    with pytest.raises(TypeError, match="max_num_seqs"):
        build_processor(MODEL, max_num_seq=8)
    with pytest.raises(ValueError, match="top_p"):
        build_processor(MODEL, sampling={"top_p": 2.0})


def test_every_row_comes_out_once_when_an_actor_is_killed():
    processor = build_processor(
        MODEL,
        sampling={"temperature": 0.8, "max_tokens": 24},
        id_column="row",
        concurrency=2,
        batch_size=8,
        **ENGINE,
    )
    dataset = ray.data.from_items(sums(480), override_num_blocks=60)
    expected = {row["row"]: row["output"] for row in processor(dataset).take_all()}
    result, killed, later = [], [], set()
    for batch in processor(dataset).iter_batches(batch_size=8, prefetch_batches=0):
        result += zip(batch["row"].tolist(), batch["output"].tolist(), strict=True)
        if killed:
            later.update(actor_pids())
        elif len(result) >= 16 and (killed := actor_pids()):
            os.kill(killed[0], signal.SIGKILL)
            time.sleep(0.1)
    assert later - set(killed), "no actor was started in the place of the killed one"
    assert sorted(row for row, _ in result) == list(range(480))
    assert dict(result) == expected
