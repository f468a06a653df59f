"""`rlagent engine` and `python -m rlagent.engine`: one embedded engine, listening."""

import argparse
import asyncio
import signal
from pathlib import Path

import uvloop
from aiohttp import web

from rlagent.engine.config import EngineConfig
from rlagent.engine.loop import Engine
from rlagent.engine.server import make_app
from rlagent.errors import EngineError, RlagentError
from rlagent.launch.child import die_with_parent


async def serve(config: EngineConfig, model_dir: Path, *, host: str, port: int, weight_version: str) -> None:
    """Load the model, listen, and run until SIGTERM or SIGINT. LoadError or EngineError say what to mend.

    A failed step ends it with EngineError: whoever supervises the process starts a sound one.
    """
    engine = Engine.load(config, model_dir, weight_version)
    runner = web.AppRunner(make_app(engine), access_log=None, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise EngineError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --port") from error
    engine.start()
    over = engine.failed
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    bound = runner.addresses[0]
    print(
        f"engine of {model_dir.name} ({config.dtype}, {engine.model.device}) at http://{bound[0]}:{bound[1]}",
        flush=True,
    )
    await over.wait()
    engine.close()
    await runner.cleanup()
    engine.ensure_healthy()


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and serve."""
    defaults = EngineConfig()
    parser = argparse.ArgumentParser(prog="rlagent engine", description="The embedded engine: SGLang's HTTP surface.")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face model directory")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000, help="0 takes a free one")
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--parent-pid", type=int, help="end with this process")
    parser.add_argument("--device", default=defaults.device, choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default=defaults.dtype, choices=("float32", "bfloat16", "float16"))
    for name in ("threads", "max_running", "max_total_tokens", "prefill_tokens", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    args = parser.parse_args(argv)
    if args.parent_pid is not None:
        die_with_parent(args.parent_pid)
    config = EngineConfig(
        device=args.device, dtype=args.dtype, threads=args.threads, max_running=args.max_running,
        max_total_tokens=args.max_total_tokens, prefill_tokens=args.prefill_tokens, seed=args.seed,
    )  # fmt: skip
    try:
        uvloop.run(serve(config, args.model, host=args.host, port=args.port, weight_version=args.weight_version))
    except RlagentError as error:
        parser.exit(1, f"rlagent engine: {error}\n")
    return 0
