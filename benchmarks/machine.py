"""One line about the machine a benchmark ran on."""

import os
import platform
from pathlib import Path


def machine() -> str:
    """Processor, cores this process may use, memory, Python."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "?",
    )
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    return f"{cpu}, {cores} cores, {memory_gib:.0f} GiB, Python {platform.python_version()}, load before {load:.1f}"
