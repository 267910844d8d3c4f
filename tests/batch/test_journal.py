"""The output file: appended line by line, gone on with, refused when it is another job's."""

import json
import os

import pytest

from nanovllm.batch.done import _DIGEST_BYTES, IdSet, NumberSet, _find
from nanovllm.batch.journal import Journal, RefusedOutput

JOB = {"model": "m", "engine": {"dtype": "float32"}}


def ok(custom_id):
    return {"custom_id": custom_id, "response": {"status_code": 200}, "error": None}


def write(path, *records, job=JOB):
    with Journal(path, job) as journal:
        for record in records:
            journal.append(record)


def test_what_was_appended_is_there_at_once_and_known_next_time(tmp_path):
    path = tmp_path / "out.jsonl"
    journal = Journal(path, JOB, fsync_interval_s=1e9)
    journal.append(ok("a"))
    assert json.loads(path.read_text()) == ok("a")
    journal.append({"prompt": "x", "output": "y", "input_line": 4})
    journal.append({"custom_id": None, "response": None, "error": {"code": "c", "line": 9}})
    journal.close()
    again = Journal(path, JOB)
    assert "a" in again.finished_ids and 4 in again.finished_lines and 9 in again.error_lines
    assert 9 not in again.finished_lines and "b" not in again.finished_ids
    assert (again.num_ok, again.num_errors) == (2, 1)
    again.close()


@pytest.mark.parametrize(("interval_s", "most"), [(0.0, 4), (1e9, 1)])
def test_results_are_brought_to_the_disk_at_intervals_and_at_the_end(
    tmp_path, monkeypatch, interval_s, most
):
    brought = []
    with Journal(tmp_path / "out.jsonl", JOB, fsync_interval_s=interval_s) as journal:
        real, fd = os.fsync, journal._fd
        monkeypatch.setattr(os, "fsync", lambda f: brought.append(f == fd) or real(f))
        for name in "abc":
            journal.append(ok(name))
    assert brought == [True] * most


@pytest.mark.parametrize("torn", [b'{"custom_id": "b', b"{}", b"\0\0\0"])
def test_a_torn_last_line_is_cut(tmp_path, torn):
    path = tmp_path / "out.jsonl"
    write(path, ok("a"))
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    with Journal(path, JOB) as journal:
        assert path.read_bytes() == whole
        journal.append(ok("b"))
    assert [json.loads(line)["custom_id"] for line in path.open()] == ["a", "b"]


def test_a_file_torn_at_any_byte_can_be_gone_on_with(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, ok("a"), ok("ü"), ok("c"))
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        Journal(path, JOB).close()
        assert path.stat().st_size == max((end for end in ends if end <= size), default=0), size


WHOLE_BAD_LINES = [
    b"\0\0\0\n",
    b"\n\0",
    b'{"a": 1}\n',
    b'{"custom_id": "b"}\n',
    b"[]\n",
    b"note\n{",
    *(
        b'{"output": "b", "input_line": %s}\n' % number
        for number in (b"-1", b"0", b"true", b'"5"', b"1e3", b"null")
    ),
]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("bad", WHOLE_BAD_LINES)
def test_a_whole_bad_line_anywhere_is_refused_and_nothing_is_cut(tmp_path, bad, force):
    path = tmp_path / "out.jsonl"
    write(path, ok("a"))
    whole = path.read_bytes()
    for damaged, number in ((b"x\n" + whole, 1), (whole + bad, 2)):
        path.write_bytes(damaged)
        with pytest.raises(RefusedOutput, match=f"line {number} is damaged, or no result"):
            Journal(path, JOB, force=force)
        assert path.read_bytes() == damaged


def test_a_result_that_stands_there_twice_counts_once(tmp_path):
    path = tmp_path / "out.jsonl"
    failed = {"custom_id": "b", "response": None, "error": {"code": "c", "line": 2}}
    plain = {"output": "x", "input_line": 3}
    write(path, ok("a"), failed, plain, ok("a"), failed, plain, ok("a"), ok("b"))
    with Journal(path, JOB) as again:
        assert (again.num_ok, again.num_errors) == (3, 0)


def test_a_job_file_nested_too_deeply_is_damaged(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, ok("a"))
    (tmp_path / "out.jsonl.job.json").write_text("[" * 100_000)
    with pytest.raises(RefusedOutput, match="job.json is damaged"):
        Journal(path, JOB)


def test_another_jobs_file_is_refused_unless_told(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, ok("a"))
    other = {"model": "m", "engine": {"dtype": "bfloat16"}}
    with pytest.raises(RefusedOutput, match="engine.dtype: 'float32' then, 'bfloat16' now"):
        Journal(path, other)
    Journal(path, other, force=True).close()
    Journal(path, other).close()  # told once, it is that job's file now
    with Journal(path, JOB, overwrite=True) as journal:
        assert journal.num_finished == 0 and path.stat().st_size == 0


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("text", ["precious\n", "precious", '{"custom_id": "a", "error": null}'])
def test_a_file_that_we_did_not_make_is_refused_though_forced(tmp_path, text, force):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(RefusedOutput, match="no notes.txt.job.json says that run-batch made it"):
        Journal(path, JOB, force=force)
    assert path.read_text() == text and [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_two_jobs_cannot_write_one_file(tmp_path):
    path = tmp_path / "out.jsonl"
    with Journal(path, JOB), pytest.raises(RefusedOutput, match="another run-batch"):
        Journal(path, JOB)
    Journal(path, JOB).close()


def test_nothing_is_written_behind_half_a_line(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    journal = Journal(path, JOB)
    real_write = __import__("os").write

    def full_disk(fd, data):
        if len(data) > 20:
            return real_write(fd, data[:20])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nanovllm.batch.journal.os.write", full_disk)
    with pytest.raises(OSError, match="No space left"):
        journal.append({**ok("a"), "x": "y" * 7 + "z" * 20})
    monkeypatch.undo()
    with pytest.raises(OSError, match="earlier write failed"):
        journal.append(ok("b"))
    journal.close()
    with Journal(path, JOB) as again:
        assert again.num_finished == 0 and path.stat().st_size == 0


def test_sets_of_what_is_done():
    ids, numbers = IdSet(), NumberSet()
    assert ids.add("a") and not ids.add("a") and ids.discard("a") and not ids.discard("a")
    assert numbers.add(100_000) and not numbers.add(100_000)
    assert 100_000 in numbers and 99_999 not in numbers and 10**9 not in numbers
    assert len(numbers) == 1


def test_a_line_number_of_any_size_costs_no_memory(tmp_path):
    """A damaged digit was a MemoryError, or gigabytes."""
    path = tmp_path / "out.jsonl"
    write(path, {"output": "b", "input_line": 10**30}, {"output": "b", "input_line": 3})
    with Journal(path, JOB) as again:
        assert again.num_finished == 2 and 10**30 in again.finished_lines
        assert 3 in again.finished_lines and 10**12 not in again.finished_lines


def test_a_digest_that_straddles_two_others_is_not_found():
    first, second = bytes(range(_DIGEST_BYTES)), bytes(range(100, 100 + _DIGEST_BYTES))
    bucket = bytearray(first + second)
    assert [_find(bucket, digest) for digest in (first, second)] == [0, _DIGEST_BYTES]
    assert _find(bucket, first[5:] + second[:5]) == -1
    # Behind one that straddles there may be the right one.
    bucket += first[5:] + second[:5]
    assert _find(bucket, first[5:] + second[:5]) == 2 * _DIGEST_BYTES


def test_a_set_of_ids_agrees_with_pythons():
    ids, expected = IdSet(), set()
    for i in range(40_000):
        text = f"id-{i * 7919 % 30_011}"
        assert ids.add(text) == (text not in expected)
        expected.add(text)
        if i % 3 == 0:
            gone = f"id-{i}"
            assert ids.discard(gone) == (gone in expected)
            expected.discard(gone)
    assert len(ids) == len(expected) and all(text in ids for text in expected)
