"""The real model on disk, written once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_weights.smollm2 import write_smollm2


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_smollm2(tmp_path_factory.mktemp("smollm2"))
