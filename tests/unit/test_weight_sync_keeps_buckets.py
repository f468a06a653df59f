"""The memory behind a bucket's handles outlives the slowest engine's answer, also where another one refuses at once."""

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from rlagent.errors import WeightSyncError
from rlagent.trainer.weight_sync.buckets import make_buckets
from rlagent.trainer.weight_sync.engine_api import EngineSet
from rlagent.trainer.weight_sync.transports import TensorTransport


class Gate(ThreadingHTTPServer):
    """An engine that answers a bucket once it is let; `refuses` before anything else."""

    def __init__(self, *, refuses: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.refuses = refuses
        self.asked, self.let = threading.Event(), threading.Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Gate

    def do_GET(self) -> None:
        self._answer(200, b'{"version": "rlagent", "device": "cpu"}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.set()
        if self.server.refuses:
            self._answer(400, b'{"message": "no"}')
            return
        self.server.let.wait()
        self._answer(200, b"{}")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Not printed."""


@contextmanager
def gate(*, refuses: bool = False) -> Iterator[tuple[Gate, str]]:
    with Gate(refuses=refuses) as server, ThreadPoolExecutor(1) as thread:
        thread.submit(server.serve_forever)
        try:
            yield server, f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.let.set()
            server.shutdown()


@pytest.mark.parametrize("refuses", [False, True])
def test_a_bucket_lives_until_every_engine_has_answered(refuses: bool) -> None:
    with gate() as (slow, slow_url), gate(refuses=refuses) as (other, other_url):
        engines = EngineSet([other_url, slow_url])
        buckets = make_buckets([("a", torch.ones(64)), ("b", torch.ones(64))], 64 * 4)
        alive: list[weakref.ref[torch.Tensor]] = []

        def push() -> None:
            bucket = next(buckets)
            alive.append(weakref.ref(bucket.flat))
            TensorTransport().send(engines, bucket)

        with ThreadPoolExecutor(1) as beside:
            sent = beside.submit(push)
            assert other.asked.wait(30)
            assert slow.asked.wait(30)
            if not refuses:
                other.let.set()
            assert not sent.done()
            assert alive[0]() is not None
            slow.let.set()
            if refuses:
                with pytest.raises(WeightSyncError, match=f"{other_url} refused"):
                    sent.result(timeout=30)
            else:
                sent.result(timeout=30)
        del sent
        buckets.close()
        gc.collect()  # the frames of an error
        assert alive[0]() is None, "it is kept no longer"
        engines.close()
