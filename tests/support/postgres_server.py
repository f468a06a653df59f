"""A PostgreSQL server of the tests' own: on a unix socket in a temporary directory, as a user that is not root."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

REQUIRED = "RLAGENT_REQUIRE_POSTGRES"
START_TIMEOUT_S = 60.0


def binaries() -> Path | None:
    """The directory of `initdb` and `postgres`: Debian's, the newest, or that of the PATH."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    found = str(debian[-1]) if debian else shutil.which("initdb")
    return None if found is None else Path(found).parent


class PostgresServer:
    """One server and its data. Made in `directory`, started by `start`, ended by `stop` or `kill`."""

    def __init__(self, programs: Path, *, fsync: bool = False, max_file_bytes: int | None = None) -> None:
        """max_file_bytes: no file of the data grows beyond it, as on a full disk."""
        self._programs = programs
        self._max_file_bytes = max_file_bytes
        self._user = _unprivileged()
        self.directory = Path(tempfile.mkdtemp(prefix="rlagent-pg-"))
        self._numbers = itertools.count()
        if self._user is not None:
            os.chown(self.directory, pwd.getpwnam(self._user).pw_uid, -1)
        self._data = self.directory / "data"
        self._process: subprocess.Popen[bytes] | None = None
        initdb = [
            programs / "initdb",
            "-D",
            self._data,
            "-A",
            "trust",
            "-U",
            "postgres",
            "-N",
            "-E",
            "UTF8",
            "--wal-segsize=1",
        ]
        subprocess.run(initdb, check=True, stdout=subprocess.DEVNULL, user=self._user, cwd=self.directory)
        # No TCP: the port only names the socket, so two servers never meet.
        durable = "on" if fsync else "off"
        settings = {
            "listen_addresses": "", "unix_socket_directories": str(self.directory), "max_connections": "200",
            "shared_buffers": "16MB", "min_wal_size": "2MB", "max_wal_size": "64MB", "deadlock_timeout": "50ms",
            "fsync": durable, "full_page_writes": durable,
        }  # fmt: skip
        with (self._data / "postgresql.auto.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in settings.items())

    def start(self) -> None:
        """Start the process; returns when it takes connections."""
        limit = "unlimited" if self._max_file_bytes is None else str(self._max_file_bytes // 1024)
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", 'ulimit -f "$0"; exec "$1" -D "$2"', limit, self._programs / "postgres", self._data],
                user=self._user, cwd=self.directory, stdout=log, stderr=log,
            )  # fmt: skip
        end = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                psycopg.connect(self.url()).close()
                return
            except psycopg.OperationalError:
                log_text = (self.directory / "log").read_text()
                assert self._process.poll() is None, log_text
                assert time.monotonic() < end, log_text
                time.sleep(0.05)

    def url(self, schema: str | None = None) -> str:
        """Of the whole database, or of one schema of it."""
        options = "" if schema is None else f"&options=-csearch_path%3D{schema}"
        return f"postgresql://postgres@/postgres?host={self.directory}{options}"

    def new_schema(self) -> str:
        """The URL of a schema that is empty."""
        name = f"test_{next(self._numbers)}"
        with psycopg.connect(self.url()) as connection:
            connection.execute(psycopg.sql.SQL("CREATE SCHEMA {}").format(psycopg.sql.Identifier(name)))
        return self.url(name)

    def execute(self, *statements: str) -> list[tuple[object, ...]]:
        """Run statements as the owner of the server, each by itself; the rows of the last."""
        with psycopg.connect(self.url(), autocommit=True, application_name="tests") as connection:
            for statement in statements[:-1]:
                connection.execute(statement.encode())
            last = connection.execute(statements[-1].encode())
            return last.fetchall() if last.description else []

    def kill(self) -> None:
        """kill -9 of the server and all its children at once: what a crash of the machine leaves, but for the disk's cache."""
        assert self._process is not None
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        self._end(signal.SIGKILL)
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)

    def stop(self) -> None:
        """End the process at once, and remove the data."""
        if self._process is not None and self._process.poll() is None:
            self._end(signal.SIGQUIT)
        shutil.rmtree(self.directory)

    def _end(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait()


def _unprivileged() -> str | None:
    """Whom to run as: PostgreSQL refuses root."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres").pw_name
    except KeyError:
        return "nobody"


def server_or_skip(*, fsync: bool = False, max_file_bytes: int | None = None) -> PostgresServer:
    """A server that runs. Without the programs the test is skipped, or fails where they are required."""
    programs = binaries()
    if programs is None:
        message = "no PostgreSQL server here; apt-get install postgresql"
        if os.environ.get(REQUIRED):
            pytest.fail(f"{message} ({REQUIRED} is set)")
        pytest.skip(message)
    server = PostgresServer(programs, fsync=fsync, max_file_bytes=max_file_bytes)
    try:
        server.start()
    except BaseException:
        server.stop()
        raise
    return server
