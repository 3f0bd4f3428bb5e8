"""Submits tasks by writing to the topic, with confluent-kafka and a schema registry only: nothing of Tidewheel's.

    python python_plain.py --bootstrap localhost:9092 --registry http://localhost:8081 --type thumbnail --count 5

Prints one line of JSON for each record that the brokers have confirmed. docs/PRODUCERS.md explains each step.
"""

from __future__ import annotations

import argparse
import json
import time
import uuid
from functools import partial

from confluent_kafka import KafkaError, Message, SerializingProducer
from confluent_kafka.schema_registry import SchemaRegistryClient, record_subject_name_strategy
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import StringSerializer

SUBJECT = "tidewheel.SubmitTask"
CONFIRMED_WITHIN_S = 30.0


def submission(task_id: str, task_type: str, number: int, priority: str) -> dict[str, object]:
    """A SubmitTask as Avro sees it; what is left out has the default of the schema."""
    payload = json.dumps({"number": number}).encode()  # the handler's keyword arguments
    return {
        "request_id": task_id,
        "task_id": task_id,
        "submitted_at": time.time_ns() // 1000,
        "spec": {
            "task_type": task_type,
            "payload": payload,
            "priority": priority,
            "metadata": {"producer": "python"},
        },
    }


def main() -> int:
    """0: all records were confirmed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", required=True, help="host:port of a broker")
    parser.add_argument("--registry", required=True, help="URL of the schema registry, or of Tidewheel's API")
    parser.add_argument("--topic", default="tidewheel.task-requests")
    parser.add_argument("--type", required=True, dest="task_type")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--priority", choices=("high", "medium", "low"), default="medium")
    options = parser.parse_args()

    registry = SchemaRegistryClient({"url": options.registry})
    schema = registry.get_latest_version(SUBJECT).schema
    serializer = AvroSerializer(
        registry,
        schema,
        conf={
            "auto.register.schemas": False,
            "use.latest.version": True,
            "subject.name.strategy": record_subject_name_strategy,
        },
    )
    producer = SerializingProducer(
        {
            "bootstrap.servers": options.bootstrap,
            "partitioner": "murmur2_random",  # as Java's default: librdkafka's own default is another
            "enable.idempotence": True,  # implies acks=all
            "key.serializer": StringSerializer("utf_8"),
            "value.serializer": serializer,
        }
    )
    failures: list[str] = []

    def on_delivery(task_id: str, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            failures.append(f"{task_id}: {error}")
            return
        place = {"task_id": task_id, "partition": message.partition(), "offset": message.offset()}
        print(json.dumps(place), flush=True)

    for number in range(options.count):
        task_id = str(uuid.uuid4())
        if number % 2:
            task_id += ".step"  # the part before the dot decides the partition
        producer.produce(
            topic=options.topic,
            key=task_id.partition(".")[0],
            value=submission(task_id, options.task_type, number, options.priority),
            on_delivery=partial(on_delivery, task_id),
        )
        producer.poll(0)
    unconfirmed = producer.flush(CONFIRMED_WITHIN_S)
    for failure in failures:
        print(failure)
    return 1 if failures or unconfirmed else 0


if __name__ == "__main__":
    raise SystemExit(main())
