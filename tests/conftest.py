"""What all tests share: one torch thread a process, no GPU test without a GPU, and where buffers have their data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import checked_shapes  # noqa: F401 (before anything of the trainer is imported)
import pytest
import torch
from postgres_server import PostgresServer, server_or_skip
from stores import Place

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """gpu-marked tests are left out where there is no CUDA device, and said so."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """The PostgreSQL server of this test process."""
    server = server_or_skip()
    yield server
    server.stop()


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Where the test's buffer has its data: each test that asks runs on both stores."""
    path = tmp_path / "b.db"
    if request.param == "sqlite":
        return Place(path)
    server: PostgresServer = request.getfixturevalue("postgres")
    return Place(path, server.new_schema())
