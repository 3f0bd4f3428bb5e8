"""The registry's read endpoints over the built-in schemas, and the driver of real registries."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import fastavro
import pytest

from infra.registry import UNKNOWN_S, RegistryIds
from schemas.catalog import newest, releases
from schemas.codec import Codec
from schemas.errors import Fatal, Retriable, UnknownSchema
from schemas.registry import answer
from tests.harness import eventually
from tests.samples import named_samples, plain

Respond = Callable[[str, str, Any], tuple[int, Any]]  # (method, path, body) → status, body


@contextmanager
def served(respond: Respond) -> Iterator[str]:
    """The address of a registry that answers as `respond` says."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, answered = respond(self.command, urlsplit(self.path).path, body)
            payload = json.dumps(answered).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(10)


@contextmanager
def client_of(respond: Respond, **options: Any) -> Iterator[RegistryIds]:
    with served(respond) as url:
        ids = RegistryIds(url, {"retries.wait.ms": 1, "retries.max.wait.ms": 2}, timeout_s=5.0, **options)
        try:
            yield ids
        finally:
            ids.close()


# --- what we serve ----------------------------------------------------------------------------------------------------


def test_every_release_is_found_by_id_by_version_and_as_the_latest() -> None:
    assert answer("/subjects") == (200, sorted(f"tidewheel.{name}" for name in newest()))
    for one in releases():
        subject = f"tidewheel.{one.name}"
        assert answer(f"/schemas/ids/{one.schema_id}") == (200, {"schema": one.text})
        assert answer(f"/schemas/ids/{one.schema_id}/schema") == (200, one.text)
        assert answer(f"/schemas/ids/{one.schema_id}/versions") == (200, [{"subject": subject, "version": one.version}])
        whole = {"subject": subject, "version": one.version, "id": one.schema_id, "schema": one.text}
        assert answer(f"/subjects/{subject}/versions/{one.version}") == (200, whole)
        assert answer(f"/subjects/{subject}/versions")[1][one.version - 1] == one.version
        if one == newest()[one.name]:
            assert answer(f"/subjects/{subject}/versions/latest") == (200, whole)


@pytest.mark.parametrize(
    ("path", "status", "error_code"),
    [
        ("/schemas/ids/256", 404, 40403),
        ("/schemas/ids/abc", 404, 40403),
        ("/schemas/ids/99999999999999999999/versions", 404, 40403),
        ("/subjects/nobody/versions", 404, 40401),
        ("/subjects/nobody/versions/1", 404, 40401),
        ("/subjects/tidewheel.Event/versions/999", 404, 40402),
        ("/subjects/tidewheel.Event/versions/newest", 422, 42202),
        ("/subjects/tidewheel.Event/versions/0", 422, 42202),
        ("/subjects/tidewheel.Event", 404, 404),
        ("/", 404, 404),
    ],
)
def test_what_is_not_there_is_answered_as_a_registry_does(path: str, status: int, error_code: int) -> None:
    found, body = answer(path)
    assert (found, body["error_code"]) == (status, error_code)
    assert body["message"]


def test_a_general_reader_reads_every_message_with_what_is_served() -> None:
    for label, message in named_samples().items():
        value = Codec.builtin().encode(message)
        _, body = answer(f"/schemas/ids/{int.from_bytes(value[1:5], 'big')}")
        schema = fastavro.parse_schema(json.loads(body["schema"]))
        source = BytesIO(value[5:])
        datum = fastavro.schemaless_reader(
            source, schema, None, return_record_name=True, return_record_name_override=True
        )
        assert datum == plain(message), label
        assert source.read() == b""


def test_confluents_deserializer_reads_the_topics_when_it_is_pointed_at_us() -> None:
    with served(lambda _, path, __: answer(path)) as url:
        RegistryIds(url).close()  # its import is quiet about what the client's own imports warn of
        from confluent_kafka.schema_registry import SchemaRegistryClient
        from confluent_kafka.schema_registry.avro import AvroDeserializer

        with SchemaRegistryClient({"url": url}) as client:
            read = AvroDeserializer(client)
            for label, message in named_samples().items():
                assert read(Codec.builtin().encode(message), None) is not None, label


# --- what we ask ------------------------------------------------------------------------------------------------------


def looked_up(ids: RegistryIds, schema_id: int) -> str:
    """What comes of a lookup, which goes on beside whoever asks."""

    def answer() -> str | None:
        try:
            return ids.schema(schema_id)
        except Retriable as error:
            if "is being looked up" not in str(error):
                raise
            return None

    return eventually(answer) or ""


class Registry:
    """What a registry does with the two questions that we put to it."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.subjects: dict[str, int] = {}
        self.status = 200

    def respond(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if self.status != 200:
            return self.status, {"error_code": self.status, "message": "not now"}
        if method == "POST":
            subject = path.split("/")[2]
            schema_id = self.subjects.setdefault(subject, len(self.subjects) + 1)
            self.texts[schema_id] = body["schema"]
            return 200, {"id": schema_id}
        schema_id = int(path.split("/")[3])
        if schema_id not in self.texts:
            return 404, {"error_code": 40403, "message": "Schema not found"}
        return 200, {"schema": self.texts[schema_id]}


def test_ids_come_from_the_registry_under_the_full_names() -> None:
    registry = Registry()
    with client_of(registry.respond) as ids:
        codec = Codec(ids)
        assert set(registry.subjects) == {f"tidewheel.{name}" for name in newest()}
        for message in named_samples().values():
            value = codec.encode(message)
            assert int.from_bytes(value[1:5], "big") == registry.subjects[f"tidewheel.{type(message).__name__}"]
            assert codec.decode(value) == message


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_registry_that_is_down_is_asked_again_later(status: int) -> None:
    registry = Registry()
    with client_of(registry.respond) as ids:
        codec = Codec(ids)
        registry.status = status
        with pytest.raises(Retriable, match="being looked up"):
            codec.decode(b"\0\0\0\1\0junk")
        with pytest.raises(Retriable, match="cannot look up schema 256 now"):
            looked_up(ids, 256)
        registry.status, registry.texts[256] = 200, newest()["Event"].text
        assert looked_up(ids, 256) == newest()["Event"].text
        with pytest.raises(Retriable):
            Codec(RegistryIds("http://127.0.0.1:1", {"max.retries": 0}))


def test_an_id_that_stays_unknown_is_given_up_after_a_while() -> None:
    registry = Registry()
    now_s = [100.0]
    with client_of(registry.respond, patience_s=3.0, now_s=lambda: now_s[0]) as ids:
        for _ in range(2):
            with pytest.raises(Retriable, match="yet"):
                looked_up(ids, 256)
            now_s[0] += 1.5
        with pytest.raises(UnknownSchema):
            looked_up(ids, 256)
        registry.texts[256] = newest()["Event"].text
        with pytest.raises(UnknownSchema):
            ids.schema(256)
        now_s[0] += UNKNOWN_S
        assert looked_up(ids, 256) == newest()["Event"].text
        with pytest.raises(UnknownSchema):
            ids.schema(2**31)


@pytest.mark.parametrize("status", [409, 401])
def test_a_registry_that_refuses_a_schema_is_fatal(status: int) -> None:
    registry = Registry()
    registry.status = status
    with client_of(registry.respond) as ids, pytest.raises(Fatal, match="compatibility"):
        Codec(ids)
