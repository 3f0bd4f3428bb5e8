"""Rules of style that no linter of ours knows. The import rules are contracts in pyproject.toml (`lint-imports`)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("schemas", "scheduler", "workers", "cron", "infra", "tidewheel")
SHOWN = (*PRODUCT, "examples", "docs")
MINE = (*SHOWN, "benchmarks", "tests")
PURE = ("scheduler/core", "cron", "workers/execution.py")
FUNCTION_LINES_MAX = 60
VAGUE = re.compile(r"(?:^|_)(?:jobs?|managers?|helpers?|utils?|misc|stuff)(?:_|$)")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Found(NamedTuple):
    """A definition, and how to find it."""

    node: Definition
    place: str
    is_public: bool


def sources(*tops: str) -> list[Path]:
    """The Python files of folders, or files."""
    paths = [path for top in tops for path in ([ROOT / top] if top.endswith(".py") else (ROOT / top).rglob("*.py"))]
    assert paths, f"nothing was found in {tops}"
    return sorted(paths)


def definitions(path: Path) -> list[Found]:
    """All classes and functions of a file, those inside of functions too (these are never public)."""
    return list(_definitions(ast.parse(path.read_text(encoding="utf-8")), str(path.relative_to(ROOT)), True))


def _definitions(parent: ast.AST, prefix: str, is_public: bool) -> Iterator[Found]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, Definition):
            is_open = is_public and not node.name.startswith("_")
            found = Found(node, f"{prefix}:{node.lineno} {node.name}", is_open)
            yield found
            yield from _definitions(node, prefix, is_open and isinstance(node, ast.ClassDef))
        else:
            yield from _definitions(node, prefix, is_public)


def test_functions_fit_on_a_screen() -> None:
    long = [
        f"{place}: {lines} lines"
        for path in sources(*MINE)
        for node, place, _ in definitions(path)
        if not isinstance(node, ast.ClassDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert not long, "\n".join(long)


def test_public_names_have_a_docstring() -> None:
    bare = []
    for path in sources(*SHOWN):
        module = ast.parse(path.read_text(encoding="utf-8"))
        if module.body and ast.get_docstring(module) is None:
            bare.append(str(path.relative_to(ROOT)))
        for node, place, is_public in definitions(path):
            if is_public and ast.get_docstring(node) is None and not _is_overload(node):
                bare.append(place)
    assert not bare, "\n".join(bare)


def _is_overload(node: Definition) -> bool:
    return any(isinstance(decorator, ast.Name) and decorator.id == "overload" for decorator in node.decorator_list)


def test_names_say_what_they_mean() -> None:
    vague = [str(path.relative_to(ROOT)) for path in sources(*MINE) if VAGUE.search(path.stem)]
    for path in sources(*MINE):
        snake = ((found, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", found.node.name).lower()) for found in definitions(path))
        vague.extend(found.place for found, name in snake if VAGUE.search(name))
    assert not vague, "\n".join(vague)


def test_chance_is_an_argument_where_all_is_pure() -> None:
    """Of `random` the core may know the type: what it draws from is handed in. Nor may it read the date."""
    wrong = []
    for path in sources(*PURE):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] == "random" for alias in node.names):
                wrong.append(f"{place} imports random")
            if isinstance(node, ast.ImportFrom) and node.module == "random":
                wrong.extend(f"{place} imports {name.name}" for name in node.names if name.name != "Random")
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in CALLS_FOR_THE_WORLD:
                wrong.append(f"{place} calls {ast.unparse(node.func)}")
    assert not wrong, "\n".join(wrong)


CALLS_FOR_THE_WORLD = {"Random", "now", "utcnow", "today", "open", "print", "input"}
