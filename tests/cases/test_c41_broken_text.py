"""C41: NUL, lone surrogates and other text that storages choke on.

Chosen: names and ids are of A-Z a-z 0-9 _ . : - only; NUL is part of payloads and results like any other character, and
refused in metadata and keys; a lone surrogate is refused everywhere (it has no UTF-8). In errors, what cannot be stored
is replaced by U+FFFD, so that every failure can be recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness import TASKS, Api, running
from tidewheel import App, PermanentError
from workers.errors import ArgumentError

app = App()
NUL, SURROGATE, LITERAL = "a\x00b", "a\ud800b", "a\\u0000b"
FINE = [NUL, "\uffff", "\U0001f989", "\u202eabc\u202c", LITERAL, "\u00e9e\u0301"]
JSON_HEADER = {"content-type": "application/json"}


@app.task(name="echo")
async def echo(value: Any) -> Any:
    return value


@app.task(name="raising")
async def raising(which: int) -> None:
    raise PermanentError([NUL, SURROGATE, LITERAL, "\U0001f989"][which])


@app.task(name="returning-surrogate")
async def returning_surrogate(in_key: bool) -> Any:
    return {SURROGATE: 1} if in_key else [SURROGATE]


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with running(app, port=0) as engine, Api(engine.address) as api:
        yield api


@pytest.mark.parametrize("text", FINE, ids=ascii)
def test_text_is_returned_unchanged(api: Api, text: str) -> None:
    assert echo.submit({text: [text]}).result(20) == {text: [text]}
    shown = api.until(api.submit("echo", {"value": {text: text}}))
    assert shown["payload"] == {"value": {text: text}}
    assert shown["result"] == {text: text}


@pytest.mark.parametrize(
    ("which", "message"), [(0, "a\ufffdb"), (1, "a\ufffdb"), (2, LITERAL), (3, "\U0001f989")], ids=ascii
)
def test_a_failure_can_be_recorded_whatever_its_message(api: Api, which: int, message: str) -> None:
    shown = api.until(api.submit("raising", {"which": which}))
    assert (shown["status"], shown["attempts"]) == ("FAILED", 1)
    assert (shown["error"]["type"], shown["error"]["message"]) == ("tidewheel.PermanentError", message)
    assert message.encode() in shown["error"]["traceback"].encode()


@pytest.mark.parametrize("in_key", [False, True])
def test_a_result_with_a_lone_surrogate_fails_the_task_in_words(api: Api, in_key: bool) -> None:
    shown = api.until(api.submit("returning-surrogate", {"in_key": in_key}))
    assert (shown["status"], shown["error"]["kind"]) == ("FAILED", "result")
    assert "lone surrogate" in shown["error"]["message"]


def test_an_argument_with_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(ArgumentError, match="lone surrogate"):
        echo.submit([SURROGATE])


@pytest.mark.parametrize(
    "text", [r"a\u0000b", r"a\ud800b", "a\uffffb", "\U0001f989", "a\u202eb", r"a\\u0000b"], ids=ascii
)
@pytest.mark.parametrize("field", ["task_type", "task_id", "queue", "tenant_id"])
def test_names_have_a_documented_set_of_characters(api: Api, field: str, text: str) -> None:
    given = f'"metadata":{{"tenant_id":"{text}"}}' if field == "tenant_id" else f'"{field}":"{text}"'
    fixed = "" if field == "task_type" else '"task_type":"echo",'
    answer = api("POST", TASKS, content=f"{{{fixed}{given}}}".encode(), headers=JSON_HEADER)
    assert answer.status_code == 422, answer.text
    assert answer.json()["type"].startswith("urn:") or answer.json()["title"]


@pytest.mark.parametrize("text", [r"a\u0000b", r"a\ud800b"])
def test_metadata_and_keys_are_refused_with_what_cannot_be_stored(api: Api, text: str) -> None:
    for given in (f'"idempotency_key":"{text}"', f'"metadata":{{"k":"{text}"}}', f'"metadata":{{"{text}":"v"}}'):
        answer = api("POST", TASKS, content=f'{{"task_type":"echo",{given}}}'.encode(), headers=JSON_HEADER)
        assert answer.status_code == 422, answer.text


def test_metadata_and_keys_keep_other_text(api: Api) -> None:
    metadata = {"\U0001f989": "\uffff \u202e", LITERAL: LITERAL}
    task_id = api.submit("echo", 1, metadata=metadata, idempotency_key=f"ключ {LITERAL}")
    shown = api.until(task_id)
    assert metadata.items() <= shown["metadata"].items()
    assert shown["idempotency_key"] == f"ключ {LITERAL}"
