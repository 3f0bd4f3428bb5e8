"""What is known of the machine and of the engine's processes: a figure means nothing without it.

An engine on disk is this process and its children (the projector, pools of handlers): what it uses is what all use.
"""

from __future__ import annotations

import os
import platform
import sqlite3
import statistics
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import tidewheel

PACKAGES = ("msgspec", "fastavro", "fastapi", "uvicorn", "httpx", "uvloop")
FSYNCS = 50  # of one block each; enough for a median
BLOCK = 4096


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    found = {"tidewheel": tidewheel.__version__, "python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    return found | {package: _version(package) for package in PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def machine(folder: Path) -> dict[str, str | int | float]:
    """Processor, memory, and the disk of `folder` with what one fsync costs on it."""
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "filesystem": filesystem(folder),
        "fsync_ms": fsync_ms(folder),
    }


def filesystem(folder: Path) -> str:
    """The type of the file system that holds `folder`."""
    place = folder.resolve()
    found = (Path("/"), "unknown")
    for line in _lines("/proc/mounts"):
        mounted, kind = line.split()[1:3]
        point = Path(mounted.replace("\\040", " "))
        if place.is_relative_to(point) and len(point.parts) >= len(found[0].parts):
            found = point, kind
    return found[1]


def fsync_ms(folder: Path) -> float:
    """The median time that a written block takes to be on the disk, in milliseconds."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"fsync-{os.getpid()}"
    times = []
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        for _ in range(FSYNCS):
            begun = time.perf_counter_ns()
            os.write(descriptor, bytes(BLOCK))
            os.fdatasync(descriptor)
            times.append((time.perf_counter_ns() - begun) / 1e6)
    finally:
        os.close(descriptor)
        path.unlink()
    return round(statistics.median(times), 3)


def processor_s() -> float:
    """Processor time of this process and of its live children since they began; of the children where /proc tells."""
    ticks = os.sysconf("SC_CLK_TCK")
    return time.process_time() + sum(_cpu_ticks(child) for child in _family()[1:]) / ticks


def processor_s_of(process: int) -> float:
    """Processor time of another process and its live children since they began; 0 if it has ended."""
    return sum(_cpu_ticks(one) for one in _family(process)) / os.sysconf("SC_CLK_TCK")


def rss_mb(process: int | None = None) -> float:
    """Memory of the family that is in RAM now, in MB (10⁶ bytes). NotImplementedError: not on this system."""
    return _status_mb("VmRSS", process)


def rss_mb_max(process: int | None = None) -> float:
    """The sum of the most that each of them ever had, in MB. NotImplementedError: not on this system."""
    return _status_mb("VmHWM", process)


def _status_mb(name: str, process: int | None) -> float:
    found = [text for one in _family(process) if (text := _field(f"/proc/{one}/status", name)) is not None]
    if not found:
        raise NotImplementedError("memory is read from /proc, which this system does not have")
    return round(sum(int(text.removesuffix("kB")) for text in found) * 1024 / 1e6, 1)


def written_bytes() -> int | None:
    """What the family had written to disks since it began; None if the system does not tell."""
    found = [text for one in _family() if (text := _field(f"/proc/{one}/io", "write_bytes")) is not None]
    return sum(map(int, found)) if found else None


def folder_bytes(folder: Path) -> int:
    """The size of the files in `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _family(process: int | None = None) -> list[int]:
    """A process, by default this one, then its live children and theirs."""
    found = [os.getpid() if process is None else process]
    for one in found:
        for line in (line for path in Path(f"/proc/{one}/task").glob("*/children") for line in _lines(path)):
            found += map(int, line.split())
    return found


def _cpu_ticks(process: int) -> int:
    lines = _lines(f"/proc/{process}/stat")
    fields = lines[0].rpartition(")")[2].split() if lines else []
    return int(fields[11]) + int(fields[12]) if fields else 0  # utime and stime, see proc(5)


def _field(path: str, name: str) -> str | None:
    for line in _lines(path):
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
