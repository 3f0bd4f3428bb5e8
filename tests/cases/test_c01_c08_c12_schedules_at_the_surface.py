"""C01, C08 and C12 at every surface: one verdict on a schedule in POST, PATCH, preview, the command line and the SDK.

Chosen: what can never fire is refused (422), as are unknown zones, instants without an offset and numbers for instants.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tests.cron_vectors import INVALID, VECTORS
from tests.harness import running
from tests.unit.surface import Caller, fresh_name
from tidewheel import App
from tidewheel.cli import cli
from workers.errors import RegistrationError

CRON = "/api/v1/cron-tasks"
ANSWER_S = 1.0
NEVER = [vector["expr"] for vector in VECTORS if vector["id"] in ("V007", "V008", "V009")]
REFUSED = [entry["expr"] for entry in INVALID] + NEVER
ZONES = ["Europe/Nowhere", "+02:00", "", "../../etc/passwd"]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with running(App(), port=0) as engine:
        yield engine.address


def body(**fields: Any) -> dict[str, Any]:
    return {"name": fresh_name("s"), "task_type": "a", "cron_expression": "0 9 * * *", **fields}


def made(call: Caller, **fields: Any) -> dict[str, Any]:
    response = call("POST", CRON, json=body(**fields))
    assert response.status_code == 201, response.text
    return dict(response.json())


def refused_fields(response: httpx.Response) -> list[str]:
    assert response.status_code == 422, response.text
    errors = response.json()["errors"]
    assert all(error["message"] for error in errors)
    return [error["field"] for error in errors]


def verdicts(call: Caller, field: str, value: Any) -> list[httpx.Response]:
    """What POST, PATCH and preview say."""
    cron_id = made(call)["cron_id"]
    rule = {"cron_expression": "0 9 * * *", field: value}
    answers = []
    for method, path, sent in (
        ("POST", CRON, body(**rule)),
        ("PATCH", f"{CRON}/{cron_id}", {field: value}),
        ("POST", f"{CRON}/preview", rule),
    ):
        began = time.monotonic()
        answers.append(call(method, path, json=sent))
        assert time.monotonic() - began < ANSWER_S
    return answers


@pytest.mark.parametrize("expression", REFUSED)
def test_what_is_no_expression_is_refused_everywhere(call: Caller, server: str, expression: str) -> None:
    for answer in verdicts(call, "cron_expression", expression):
        assert refused_fields(answer) == ["cron_expression"]
        assert answer.json()["errors"][0]["allowed"]
    app = App()
    with pytest.raises(RegistrationError, match="cron_expression"):
        app.cron(expression, name="n")(app.task(name="t")(print_nothing))
    ran = CliRunner().invoke(cli, ["cron", "preview", "--server", server, "--json", "--", expression])
    assert ran.exit_code == 1, ran.output
    assert '"cron_expression"' in ran.stderr


def print_nothing() -> None:
    """A task."""


@pytest.mark.parametrize("zone", ZONES)
def test_what_is_no_zone_is_refused_everywhere(call: Caller, zone: str) -> None:
    for answer in verdicts(call, "timezone", zone):
        assert refused_fields(answer) == ["timezone"]


def test_zones_are_answered_as_the_data_spells_them(call: Caller) -> None:
    cron_id = made(call, timezone="europe/paris")["cron_id"]
    shown = call("GET", f"{CRON}/{cron_id}").json()
    assert shown["timezone"] == "Europe/Paris"
    assert shown["tzdata"] >= "2026f"


def test_the_preview_answers_as_the_vectors_do(call: Caller) -> None:
    for vector in (one for one in VECTORS if one["expected"]):
        asked = {
            "cron_expression": vector["expr"],
            "timezone": vector["tz"],
            "start": vector["start"],
            "count": len(vector["expected"]),
        }
        answer = call("POST", f"{CRON}/preview", json=asked)
        expected = vector.get("tzdata_expected", {}).get("2026f", vector["expected"])
        assert answer.json()["next"] == expected, vector["id"]


@pytest.mark.parametrize(
    "at",
    ["2026-06-01T12:00:00", 1780315200, 1780315200000, "2026-03-08T02:30:00[America/New_York]", "9999-12-31T23:59:59Z"],
)
@pytest.mark.parametrize("field", ["start_at", "end_at"])
def test_instants_need_an_offset_and_a_possible_year(call: Caller, field: str, at: object) -> None:
    for answer in verdicts(call, field, at):
        assert refused_fields(answer) == [field]


def test_an_instant_is_answered_as_the_same_instant(call: Caller) -> None:
    cron_id = made(call, start_at="2036-06-01T12:00:00+02:00", end_at="2036-06-03T12:00:00.1234561Z")["cron_id"]
    shown = call("GET", f"{CRON}/{cron_id}").json()
    assert shown["start_at"] == "2036-06-01T10:00:00.000000Z"
    assert shown["end_at"] == "2036-06-03T12:00:00.123457Z"  # never earlier than what was said
    assert shown["next_fire_time"] == "2036-06-02T09:00:00Z"


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"every_seconds": 90}, "every_seconds"),
        ({"cron_expression": None}, "cron_expression"),
        ({"cron_expression": None, "every_seconds": 0.5}, "every_seconds"),
        ({"cron_expression": None, "every_seconds": True}, "every_seconds"),
        ({"cron_expression": None, "calendar": []}, "calendar"),
        ({"cron_expression": None, "calendar": ["2036-01-02T00:00:00Z", "2036-01-01T00:00:00Z"]}, "calendar"),
        ({"anchor": "2036-01-01T00:00:00Z"}, "anchor"),
        ({"overlap_policy": "unknown"}, "overlap_policy"),
        ({"misfire_policy": "some"}, "misfire_policy"),
        ({"misfire_max": 0}, "misfire_max"),
        ({"misfire_grace_seconds": 0}, "misfire_grace_seconds"),
        ({"jitter_seconds": 86_401}, "jitter_seconds"),
        ({"gap_policy": "both"}, "gap_policy"),
        ({"end_at": "2026-01-01T00:00:00Z", "start_at": "2027-01-01T00:00:00Z"}, "end_at"),
        ({"enabled": "yes"}, "enabled"),
        ({"name": "a b"}, "name"),
        ({"cron_id": "a.b"}, "cron_id"),
        ({"cron_id": "cron-1"}, "cron_id"),
        ({"idempotency_key": "k"}, "idempotency_key"),
        ({"scheduled_at": "2036-01-01T00:00:00Z"}, "scheduled_at"),
        ({"max_retries": -1}, "max_retries"),
        ({"metadata": {"tenant_id": "a b"}}, "metadata.tenant_id"),
    ],
)
def test_each_wrong_field_is_named(call: Caller, wrong: dict[str, Any], field: str) -> None:
    assert refused_fields(call("POST", CRON, json=body(**wrong))) == [field]
