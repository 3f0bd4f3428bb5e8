"""A project with a package that has the name of one of ours is told so, and what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tidewheel._neighbours import NAMES, check_folder, check_neighbours

HOME = Path(__file__).resolve().parents[2]


def _import_tidewheel(
    folder: Path, code: str = "import tidewheel", *, with_path: bool = True
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PYTHONPATH": str(HOME)} if with_path else {},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _refusal(run: subprocess.CompletedProcess[str]) -> str:
    assert run.returncode == 1
    assert "ImportError: tidewheel cannot be used beside your own 'workers'" in run.stderr
    return run.stderr


def test_a_package_in_the_current_folder_is_named_with_the_ways_out(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "__init__.py").touch()
    said = _refusal(_import_tidewheel(tmp_path))
    assert str(tmp_path.resolve() / "workers") in said
    assert "rename yours" in said
    assert "yourproject.workers" in said


@pytest.mark.parametrize("module", ["workers/__init__", "workers"])
def test_one_that_was_imported_before_is_noticed(tmp_path: Path, module: str) -> None:
    file = tmp_path / f"{module}.py"
    file.parent.mkdir(exist_ok=True)
    file.touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    name = module.removesuffix("/__init__").replace("/", ".")
    code = f"import sys; sys.path[0] = {str(tmp_path)!r}; import {name}; sys.path[0] = {str(HOME)!r}; import tidewheel"
    _refusal(_import_tidewheel(elsewhere, code, with_path=False))


def test_folders_that_are_no_packages_hide_nothing(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "main.tf").touch()
    check_folder(tmp_path)
    assert _import_tidewheel(tmp_path).stderr == ""


def test_our_own_folder_is_no_neighbour() -> None:
    check_folder(HOME)
    check_neighbours()


def test_a_folder_that_is_about_to_be_imported_from_is_checked(tmp_path: Path) -> None:
    (tmp_path / "cron.py").touch()
    with pytest.raises(ImportError, match="your own 'cron'"):
        check_folder(tmp_path)
