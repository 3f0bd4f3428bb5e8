"""The framing, and what is said of records that are none of ours."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from schemas.catalog import newest
from schemas.codec import Codec
from schemas.errors import Undecodable, UnknownSchema
from schemas.messages import Priority, RetryPolicy, SubmitTask, TaskSpec
from schemas.release import FIRST_ID

CODEC = Codec.builtin()
SUBMIT = SubmitTask(request_id="r", spec=TaskSpec(task_type="t"), submitted_at=1)


def test_the_frame_is_confluents() -> None:
    value = CODEC.encode(SUBMIT)
    assert value[0] == 0
    assert int.from_bytes(value[1:5], "big") == newest()["SubmitTask"].schema_id >= FIRST_ID


@pytest.mark.parametrize(
    "value",
    [None, b"", b"\0", b"\0\0\0\0", b'{"a":1}', b"\1" + CODEC.encode(SUBMIT)[1:], CODEC.encode(SUBMIT)[:-1], "text"],
)
def test_a_record_without_our_frame_is_undecodable(value: Any) -> None:
    with pytest.raises(Undecodable):
        CODEC.decode(value)


def test_an_id_that_nobody_gave_is_an_unknown_schema() -> None:
    with pytest.raises(UnknownSchema, match="256"):
        CODEC.decode(b"\0\0\0\1\0" + b"junk!!")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (TaskSpec(task_type="\ud800"), "surrogates"),
        (TaskSpec(task_type="t", lease_ms=2**63), "64 bits"),
    ],
)
def test_what_avro_cannot_hold_is_refused_by_a_value_error(spec: TaskSpec, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        CODEC.encode(SubmitTask(request_id="r", spec=spec, submitted_at=1))


def test_equal_policies_are_one_object_after_decoding() -> None:
    """Many thousands of waiting tasks share few policies; each is kept once."""
    spec = TaskSpec(task_type="t", retry=RetryPolicy(max_attempts=9, retry_on=("OSError",)), priority=Priority.LOW)
    value = CODEC.encode(SubmitTask(request_id="r", spec=spec, submitted_at=1))
    one, other = CODEC.decode(value), CODEC.decode(value)
    assert isinstance(one, SubmitTask) and isinstance(other, SubmitTask)
    assert one.spec == spec and one.spec.retry is other.spec.retry


def test_the_built_in_schemas_need_no_avro_library_and_no_registry_client() -> None:
    code = (
        "import sys, schemas.codec as c; c.Codec.builtin(); print({'fastavro', 'confluent_kafka'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "set()"
