"""The codec against a general Avro library, and against bytes that nobody wrote."""

from __future__ import annotations

import json
from contextlib import suppress
from io import BytesIO

import fastavro
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schemas.catalog import newest
from schemas.codec import Codec
from schemas.errors import DecodeError, Undecodable
from schemas.messages import Message
from tests.samples import TOPIC_TYPES, named_samples, plain, strategy

CODEC = Codec.builtin()
PARSED = {name: fastavro.parse_schema(json.loads(release.text)) for name, release in newest().items()}
SAMPLES = [CODEC.encode(message) for message in named_samples().values()]
any_message = st.one_of([strategy(of) for of in TOPIC_TYPES])


@pytest.mark.parametrize("of", TOPIC_TYPES, ids=lambda of: of.__name__)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_bytes_are_those_of_a_general_library_and_come_back_equal(of: type[Message], data: st.DataObject) -> None:
    message = data.draw(strategy(of))
    value = CODEC.encode(message)
    expected = BytesIO()
    fastavro.schemaless_writer(expected, PARSED[of.__name__], plain(message))
    assert value[5:] == expected.getvalue()
    assert CODEC.decode(value) == message


@settings(max_examples=400, deadline=None)
@given(
    value=st.binary(max_size=200)
    | st.builds(lambda head, body: head + body, st.sampled_from([s[:5] for s in SAMPLES]), st.binary(max_size=300))
)
@example(value=b"")
def test_junk_is_named_as_such(value: bytes) -> None:
    try:
        message = CODEC.decode(value)
    except DecodeError:
        return
    # Bytes that are a message after all (a number may be written longer than it need be) say the same when rewritten.
    assert CODEC.decode(CODEC.encode(message)) == message or message != message


@settings(max_examples=600, deadline=None)
@given(sample=st.sampled_from(SAMPLES), data=st.data())
def test_a_broken_record_is_a_message_or_named_as_broken(sample: bytes, data: st.DataObject) -> None:
    value = bytearray(sample)
    for place in data.draw(st.lists(st.integers(5, max(5, len(value) - 1)), min_size=1, max_size=4)):
        if place < len(value):
            value[place] = data.draw(st.sampled_from([0, 1, 2, 127, 128, 255]) | st.integers(0, 255))
    if data.draw(st.booleans()):
        place = data.draw(st.integers(5, len(value)))
        value[place:place] = data.draw(st.sampled_from([b"\xff" * 9 + b"\x01", b"\xfe" * 9 + b"\x01", b"\xff" * 20]))
    with suppress(DecodeError):
        CODEC.decode(bytes(value))


@pytest.mark.parametrize("sample", SAMPLES, ids=list(named_samples()))
def test_every_truncation_and_every_extension_is_noticed(sample: bytes) -> None:
    for length in range(len(sample)):
        with pytest.raises(Undecodable):
            CODEC.decode(sample[:length])
    with pytest.raises(Undecodable):
        CODEC.decode(sample + b"\0")
    CODEC.decode(sample)  # what was seen truncated does not colour what is whole


@settings(max_examples=100, deadline=None)
@given(messages=st.lists(any_message, min_size=2, max_size=6))
def test_what_was_decoded_before_does_not_matter(messages: list[Message]) -> None:
    values = [CODEC.encode(message) for message in messages]
    for value, message in [*zip(values, messages, strict=True), *zip(values, messages, strict=True)]:
        assert CODEC.decode(value) == message
        assert CODEC.encode(message) == value
