"""Thousands of random workloads: each request gets what it gets alone, whatever else runs.

`pytest -m nightly tests/differential` runs 3,000; NANOVLLM_WORKLOADS=FIRST:LAST runs a range of
numbers, such as the one that a failure names.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from differential.answers import Alone
from differential.workloads import Workload

_NUM_DEFAULT = 25
_NUM_NIGHTLY = 3000


@pytest.fixture(scope="module")
def alone(tiny_model):
    oracle = Alone(tiny_model)
    yield oracle
    oracle.llm.close()


def run_workloads(numbers, model_dir, alone) -> None:
    totals: Counter[str] = Counter()
    failures = []
    for number in numbers:
        workload = Workload(number, model_dir, alone)
        try:
            workload.run()
        except Exception as error:
            failures.append(f"workload {number}: {type(error).__name__}: {error!s:.2000}")
        alone.forget()
        for name in ("num_requests", "num_tokens", "num_aborts", "num_faults"):
            totals[name] += getattr(workload, name)
    print(len(numbers), "workloads,", dict(totals), alone.num_near_ties, "near ties")
    assert not failures, f"{len(failures)} of {len(numbers)} failed:\n" + "\n".join(failures[:20])


def test_each_request_gets_what_it_gets_alone(tiny_model, alone):
    run_workloads(range(_NUM_DEFAULT), tiny_model, alone)


@pytest.mark.nightly
def test_each_request_gets_what_it_gets_alone_many_times(tiny_model, alone):
    first, _, last = os.environ.get("NANOVLLM_WORKLOADS", f"0:{_NUM_NIGHTLY}").partition(":")
    run_workloads(range(int(first), int(last or int(first) + 1)), tiny_model, alone)
