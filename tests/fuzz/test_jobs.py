"""Whole jobs over files of broken, odd and enormous lines: one result or reason for each line."""

from __future__ import annotations

import json
import random
from pathlib import Path

from fuzz.test_lines import BIG, LINES, resident_bytes

from nanovllm.batch import BatchOptions, run_batch
from nanovllm.batch.source import MAX_LINE_BYTES

MODEL = Path(__file__).parents[1] / "tiny-qwen3"
ENGINE = {"device": "cpu", "dtype": "float32", "cpu_kvcache_space_gib": 0.05, "max_num_seqs": 8}
GOOD = {"prompt": "12+34=", "temperature": 0, "max_tokens": 2}


def run(source, output):
    options = BatchOptions(str(source), output, show_progress=False)
    return run_batch(MODEL, options, **ENGINE)


def broken(line: bytes, rng: random.Random) -> bytes:
    """A line with bytes put in, taken out, changed or doubled."""
    data = bytearray(line)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            data[place:place] = rng.choice(
                [b"\0", b"\xff", b"\xc3", b"\xef\xbb\xbf", b"{", b'"', b"9"]
            )
        elif kind == 1:
            del data[place : place + rng.randint(1, 5)]
        elif kind == 2 and place < len(data):
            data[place] = rng.randrange(256)
        else:
            data[place:place] = data[place : place + rng.randint(1, 20)]
    return bytes(data).replace(b"\n", b" ")


def test_every_line_of_a_broken_file_is_answered_once(tmp_path):
    rng = random.Random(0)
    whole = [json.dumps({**line, "max_tokens": 2}).encode() for line in LINES[:3]]
    whole += [json.dumps(line).encode() for line in LINES[3:]]
    lines = [broken(rng.choice(whole), rng) for _ in range(400)]
    lines[::20] = [json.dumps(GOOD).encode() for _ in lines[::20]]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    endings = [b"\n", b"\r\n"]
    source.write_bytes(b"".join(line + rng.choice(endings) for line in lines) + b"\xc3")
    num_lines = sum(bool(line.strip()) for line in lines) + 1
    summary = run(source, output)
    assert summary.num_ok + summary.num_failed == num_lines
    assert summary.num_ok >= len(lines[::20])
    records = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert len(records) == num_lines
    assert all(r["error"]["message"] for r in records if r.get("error"))
    before = output.read_bytes()
    assert run(source, output).num_ok == 0
    assert output.read_bytes() == before, "what has an answer is not asked again"


def test_a_line_of_a_hundred_megabytes_is_refused_and_the_others_run(tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = json.dumps(GOOD).encode() + b"\n"
    with source.open("wb") as file:
        file.write(good)
        file.write(b'{"prompt": "')
        for _ in range(100):
            file.write(b"x" * 10**6)
        file.write(b'"}\n' + good)
        file.write(b'{"prompt": "x", "' + b"k" * BIG + b'": 1, "temperature": -1}\n' + good)
    before = resident_bytes()
    summary = run(source, output)
    assert (summary.num_ok, summary.num_failed) == (3, 2)
    assert resident_bytes() - before < 4 * MAX_LINE_BYTES + 20 * BIG
    reasons = [json.loads(line).get("error") for line in output.read_bytes().splitlines()]
    assert any(reason and "longer than 64 MiB" in reason["message"] for reason in reasons)
