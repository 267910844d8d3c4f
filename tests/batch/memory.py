"""Peak memory of a job of 10,000 and of 200,000 requests: run it by hand, it takes many minutes.

python tests/batch/memory.py [NUM_LINES ...]
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests" / "tiny-qwen3"


def peak_rss_mib(num_lines: int, directory: Path) -> float:
    """Run the job in a process of its own; return the most memory that it held."""
    requests, results = directory / f"{num_lines}.jsonl", directory / f"{num_lines}.out.jsonl"
    with requests.open("w") as file:
        for i in range(num_lines):
            body = {"prompt": f"{i % 100}+{i * 7 % 100}=", "temperature": 0, "max_tokens": 1}
            line = {"custom_id": f"request-{i}", "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps({**line, "body": body}) + "\n")
    command = [sys.executable, "-m", "nanovllm", "run-batch", "-i", requests, "-o", results]
    options = ["--device", "cpu", "--cpu-kvcache-space-gib", "0.25", "--dtype", "float32"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*command, "--model", MODEL, *options], env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, status
    with results.open() as file:
        assert sum(1 for _ in file) == num_lines
    return usage.ru_maxrss / 1024


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        for argument in sys.argv[1:] or ["10000", "200000"]:
            started = time.monotonic()
            peak = peak_rss_mib(int(argument), Path(name))
            elapsed = time.monotonic() - started
            print(f"{int(argument):,} lines: peak {peak:,.1f} MiB, {elapsed:.0f} s", flush=True)
