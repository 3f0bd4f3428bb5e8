"""The published jars of the services, fetched once by Maven into a folder of the user; and a Java that can run them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import tarfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from infra.services.errors import ServiceMissing

POM = Path(__file__).with_name("pom.xml")
FETCH_S = 600.0  # for some 60 to 170 MB
JAVA_S = 30.0  # for `java -version`
LINES_SHOWN = 15
_POM_NAMES = {"m": "http://maven.apache.org/POM/4.0.0"}
_JAVA_PLACES = (
    ("/usr/lib/jvm", "*/bin/java"),
    ("/opt/java", "*/bin/java"),
    ("/Library/Java/JavaVirtualMachines", "*/Contents/Home/bin/java"),
    (str(Path.home() / ".sdkman/candidates/java"), "*/bin/java"),
)


def version_of(service: str) -> str:
    """The version of a service that the pom names."""
    version = ET.parse(POM).getroot().findtext(f"m:properties/m:{service}.version", namespaces=_POM_NAMES)
    assert version is not None, f"the pom names no version of {service}"
    return version


def jars_of(service: str) -> Path:
    """The folder of a service's jars; they are fetched if they are not there. Raises ServiceMissing."""
    folder = _cache() / f"{service}-{version_of(service)}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f"{folder.name}.lock")):
            if not folder.is_dir():  # nobody fetched it while we waited
                _fetch(service, folder)
    return folder


def are_cached(service: str) -> bool:
    """Whether a start of the service fetches nothing."""
    return (_cache() / f"{service}-{version_of(service)}").is_dir()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps other processes out until the end of the block, or of this process. What is done inside has deadlines."""
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "tidewheel" / "services"


def _fetch(service: str, folder: Path) -> None:
    """Into a folder beside it, which gets its name when it is complete."""
    maven = shutil.which("mvn")
    if maven is None:
        raise ServiceMissing(
            f"Maven is needed once, to fetch {service} {version_of(service)}, and there is no mvn on PATH",
            hint="install it (Debian: apt install maven; macOS: brew install maven), or use docker-compose.yml",
        )
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    command = [maven, "-q", "-B", "-f", str(POM), "-P", service, "dependency:copy-dependencies"]
    try:
        done = subprocess.run(
            [*command, f"-DoutputDirectory={part}"], stdin=subprocess.DEVNULL, capture_output=True, timeout=FETCH_S
        )
    except subprocess.TimeoutExpired as error:
        raise _not_fetched(service, f"within {FETCH_S:.0f} s", error.stdout or b"") from error
    if done.returncode or not part.is_dir():
        raise _not_fetched(service, f"(exit code {done.returncode})", done.stdout + done.stderr)
    _unpack(part)
    part.rename(folder)


def _not_fetched(service: str, how: str, said: bytes) -> ServiceMissing:
    return ServiceMissing(
        f"Maven did not fetch {service} {version_of(service)} {how}",
        hint="is there a network? A mirror or proxy is set in ~/.m2/settings.xml",
        log="\n".join(said.decode(errors="replace").splitlines()[-LINES_SHOWN:]),
    )


def _unpack(folder: Path) -> None:
    for archive in folder.glob("*.tar.gz"):
        with tarfile.open(archive) as content:
            content.extractall(folder, filter="data")
        archive.unlink()


# --- Java -------------------------------------------------------------------------------------------------------------


def java_for(service: str, oldest: int, newest: int | None = None) -> str:
    """The path of a Java whose major version the service can do with. Raises ServiceMissing."""
    found = []
    for path in _javas():
        version = java_version(path)
        if version is not None and oldest <= version <= (newest or version):
            return path
        found.append(f"{path} is {'no Java' if version is None else f'Java {version}'}")
    wanted = f"Java {oldest}" if oldest == newest else f"Java {oldest} or later"
    raise ServiceMissing(
        f"{service} needs {wanted}, and there is none: {'; '.join(found) or 'no Java at all was found'}",
        hint=f"install one (Debian: apt install openjdk-{oldest}-jre-headless) or let JAVA_HOME name its folder",
    )


def _javas() -> list[str]:
    """Where a Java may be, the one that the user chose first."""
    home, on_path = os.environ.get("JAVA_HOME"), shutil.which("java")
    paths = [f"{home}/bin/java"] if home else []
    paths += [on_path] if on_path else []
    for place, pattern in _JAVA_PLACES:
        paths += sorted(str(path) for path in Path(place).glob(pattern))
    return list({os.path.realpath(path): path for path in reversed(paths)}.values())[::-1]


@cache
def java_version(path: str) -> int | None:
    """The major version of the Java at `path`; None if there is none that runs."""
    try:
        said = subprocess.run(
            [path, "-version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=JAVA_S, text=True
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return major_version(said.stderr)


def major_version(said: str) -> int | None:
    """The major version in what `java -version` says: 17 of "17.0.15", 8 of "1.8.0_392"."""
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    return None if found is None else int(found[1])
