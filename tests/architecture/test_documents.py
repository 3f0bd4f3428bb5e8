"""What the documents show is so: generated parts are up to date, examples run, links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from docs import lifecycle, limits
from schemas.messages import Status

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CHANGELOG.md"]
EXAMPLE_S = 60.0


def test_the_life_cycle_is_drawn_as_it_is() -> None:
    assert lifecycle.PATH.read_text(encoding="utf-8") == lifecycle.text(), "run: python -m docs.lifecycle"


def test_every_status_is_explained() -> None:
    assert lifecycle.MEANINGS.keys() == set(Status) - {Status.UNKNOWN}


def test_the_limits_are_listed_as_they_are() -> None:
    assert limits.PATH.read_text(encoding="utf-8") == limits.text(), "run: python -m docs.limits"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", _prose(path)):
        if "://" in target:
            continue
        linked = path.parent / target if target else path
        assert linked.exists(), f"{path.relative_to(ROOT)} links to {target}"
        if anchor:
            assert anchor in _anchors(linked), f"{path.relative_to(ROOT)} links to {target}#{anchor}"


def _prose(path: Path) -> str:
    return re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def _anchors(path: Path) -> set[str]:
    headings: list[str] = re.findall(r"^#+ (.*)$", _prose(path), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}


# --- examples ---------------------------------------------------------------------------------------------------------


def examples(path: Path, info: str) -> list[str]:
    """The blocks of code that are marked with `info`."""
    return re.findall(rf"^```{info}\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run(folder: Path, script: str) -> str:
    """What a script in a folder prints. AssertionError with all that it said, if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    command = [sys.executable, script]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=EXAMPLE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_in_the_readme_runs_as_it_is_printed(tmp_path: Path) -> None:
    (example,) = examples(ROOT / "README.md", "python")
    (tmp_path / "hello.py").write_text(example)
    assert run(tmp_path, "hello.py").splitlines()[-1] == "Hello, Ada!"
    assert (tmp_path / "data").is_dir()


def test_the_examples_in_the_guide_run(tmp_path: Path) -> None:
    """Those marked `python` are one module, those marked `python run` are run one after the other in an engine."""
    guide = ROOT / "docs" / "GUIDE.md"
    (tmp_path / "guide.py").write_text("\n".join(examples(guide, "python")))
    steps = "\n".join(examples(guide, "python run"))
    tests = "test_a_picture_is_resized()\ntest_the_function_alone()\n"
    engine = "with app.embedded('data', app='guide:app', grace_s=1.0):\n"
    script = f"from guide import *\n\n{engine}{textwrap.indent(steps, '    ')}\n{tests}print('done')\n"
    (tmp_path / "steps.py").write_text(script)
    assert run(tmp_path, "steps.py").splitlines()[-1] == "done"
