"""kill -9 at random moments: nothing is lost, nothing doubled, nothing different."""

import random
import subprocess
import time

import pytest
from batch_jobs import command, environment, requests, results


def run_killed(words, output, draw, *, at_start):
    """Start the job and kill it, while it starts or while it writes; False: it was done before."""
    size = output.stat().st_size if output.exists() else 0
    process = subprocess.Popen(words, env=environment(), stderr=subprocess.DEVNULL)
    try:
        if at_start:
            time.sleep(draw.uniform(0, 4))
        else:
            while process.poll() is None and (not output.exists() or output.stat().st_size <= size):
                time.sleep(0.002)
            time.sleep(draw.uniform(0, 0.4))
        was_running = process.poll() is None
    finally:
        process.kill()
        process.wait()
    return was_running


def survive(directory, num_kills, num_requests, seed):
    """Run jobs that are killed `num_kills` times in all and compare them with one that is not."""
    draw = random.Random(seed)
    source, whole = directory / "in.jsonl", directory / "whole.jsonl"
    source.write_text(requests(num_requests), encoding="utf-8")
    done = subprocess.run(command(source, whole, "--quiet"), env=environment(), check=False)
    assert done.returncode == 1, "two lines are bad on purpose"
    expected = results(whole)
    assert len(expected) == num_requests + 2
    kills = job = 0
    while kills < num_kills:
        output = directory / f"out-{job}.jsonl"
        job += 1
        words = command(source, output, "--quiet", "--fsync-interval", draw.choice("05"))
        while kills < num_kills:
            if not run_killed(words, output, draw, at_start=draw.random() < 0.2):
                break
            kills += 1
            job_file = output.with_name(output.name + ".job.json")
            if job_file.exists() and draw.random() < 0.3:  # as a crash of the machine would
                with output.open("ab") as file:
                    file.write(draw.choice([b'{"custom_id": "gr\xc3', b"\0" * 30]))
        last = subprocess.run(words, env=environment(), check=False)
        assert last.returncode == 1
        assert results(output) == expected
    return kills, job


def test_three_kills_lose_double_and_change_nothing(tmp_path):
    survive(tmp_path, num_kills=3, num_requests=120, seed=1)


@pytest.mark.slow
def test_thirty_kills_lose_double_and_change_nothing(tmp_path):
    kills, jobs = survive(tmp_path, num_kills=30, num_requests=600, seed=2)
    print(f"{kills} kills in {jobs} jobs")
