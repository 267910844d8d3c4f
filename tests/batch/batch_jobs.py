"""Jobs on the demo model for tests: requests of all forms, the command, and what came out."""

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests" / "tiny-qwen3"
ENGINE = {
    "device": "cpu",
    "dtype": "float32",
    "cpu_kvcache_space_gib": 0.05,
    "max_num_seqs": 4,
}


def requests(count):
    """Chats, completions and plain lines; greedy and drawn; two that cannot run."""
    lines = []
    for i in range(count):
        kind, question = i % 3, f"{i % 90 + 10}+{i % 9}="
        if kind == 0:
            body = {"messages": [{"role": "user", "content": question}], "temperature": 0}
            url = "/v1/chat/completions"
        else:
            body = {"prompt": "And the LORD said", "temperature": 0.9, "max_tokens": 4 + i % 12}
            url = "/v1/completions"
        if kind == 2:
            lines.append({**body, "row": i})
        else:
            line = {"custom_id": f"größe-{i}", "method": "POST", "url": url, "body": body}
            lines.append(line)
    texts = [json.dumps(line, ensure_ascii=False) for line in lines]
    texts.insert(count // 3, "{broken")
    texts.insert(count // 2, texts[0])  # a custom_id that was there before
    texts.insert(5, "")
    return "\n".join(texts) + "\n"


def command(source, output, *more, **options):
    """The command line of a job."""
    words = [sys.executable, "-m", "nanovllm", "run-batch", "-i", source, "-o", output]
    for name, value in {**ENGINE, "model": MODEL, **options}.items():
        words += ["--" + name.replace("_", "-"), value]
    return [str(word) for word in [*words, *more]]


def environment():
    """One thread: two that wait for each other are slow where others compute too."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def results(path):
    """What answers each line, by its id or number: texts, or the error; asserts each came once."""
    found = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        error = record.get("error")
        if error:
            key, value = ("error", error["line"]), error["message"]
        elif "response" in record:
            choice = record["response"]["body"]["choices"][0]
            key = record["custom_id"]
            value = choice["message"]["content"] if "message" in choice else choice["text"]
        else:
            key, value = record["row"], record["output"]
        assert key not in found, f"{key} was written twice"
        found[key] = value
    return found
