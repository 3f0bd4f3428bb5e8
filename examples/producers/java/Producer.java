import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.time.Instant;
import java.time.temporal.ChronoUnit;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Properties;
import java.util.UUID;
import java.util.concurrent.Future;
import org.apache.avro.Schema;
import org.apache.avro.generic.GenericData;
import org.apache.avro.generic.GenericDatumWriter;
import org.apache.avro.generic.GenericRecord;
import org.apache.avro.generic.GenericRecordBuilder;
import org.apache.avro.io.BinaryEncoder;
import org.apache.avro.io.EncoderFactory;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerConfig;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Submits tasks by writing to the topic, with Kafka's client and Avro only. The schema and its id are asked of
 * the registry once; the five bytes of the frame are written here.
 *
 * <pre>
 * mvn -q dependency:copy-dependencies -DoutputDirectory=libs
 * java -cp 'libs/*' Producer.java localhost:9092 http://localhost:8081 tidewheel.task-requests thumbnail 5
 * </pre>
 *
 * Prints one line of JSON for each record that the brokers have confirmed. docs/PRODUCERS.md explains each step.
 */
public final class Producer {
    private static final String SUBJECT = "tidewheel.SubmitTask";

    private final Schema schema;
    private final int schemaId;

    private Producer(String registry) throws IOException, InterruptedException {
        URI latest = URI.create(registry + "/subjects/" + SUBJECT + "/versions/latest");
        HttpResponse<String> answer = HttpClient.newHttpClient()
                .send(HttpRequest.newBuilder(latest).build(), HttpResponse.BodyHandlers.ofString());
        if (answer.statusCode() != 200) {
            throw new IOException(latest + " answered " + answer.statusCode() + ": " + answer.body());
        }
        JsonNode body = new ObjectMapper().readTree(answer.body());
        schema = new Schema.Parser().parse(body.get("schema").asText());
        schemaId = body.get("id").asInt();
    }

    /** A SubmitTask; what is not set has the default of the schema. */
    private GenericRecord submission(String taskId, String taskType, int number) {
        Schema spec = schema.getField("spec").schema();
        byte[] payload = ("{\"number\": " + number + "}").getBytes(StandardCharsets.UTF_8);
        Map<String, String> metadata = new LinkedHashMap<>();
        metadata.put("producer", "java");
        return new GenericRecordBuilder(schema)
                .set("request_id", taskId)
                .set("task_id", taskId)
                .set("submitted_at", ChronoUnit.MICROS.between(Instant.EPOCH, Instant.now()))
                .set("spec", new GenericRecordBuilder(spec)
                        .set("task_type", taskType)
                        .set("payload", ByteBuffer.wrap(payload))
                        .set("priority", new GenericData.EnumSymbol(spec.getField("priority").schema(), "high"))
                        .set("metadata", metadata)
                        .build())
                .build();
    }

    /** The record's value: a zero byte, the schema's id in four bytes, the Avro body. */
    private byte[] framed(GenericRecord record) throws IOException {
        ByteArrayOutputStream out = new ByteArrayOutputStream();
        out.write(0);
        out.write(ByteBuffer.allocate(4).putInt(schemaId).array());
        BinaryEncoder encoder = EncoderFactory.get().binaryEncoder(out, null);
        new GenericDatumWriter<GenericRecord>(schema).write(record, encoder);
        encoder.flush();
        return out.toByteArray();
    }

    public static void main(String[] arguments) throws Exception {
        if (arguments.length != 5) {
            System.err.println("usage: Producer.java <bootstrap> <registry> <topic> <task type> <count>");
            System.exit(2);
        }
        Producer submitter = new Producer(arguments[1]);
        Properties properties = new Properties();
        properties.put(ProducerConfig.BOOTSTRAP_SERVERS_CONFIG, arguments[0]);
        properties.put(ProducerConfig.ACKS_CONFIG, "all");
        properties.put(ProducerConfig.ENABLE_IDEMPOTENCE_CONFIG, true);
        // No partitioner is set: the default one hashes the key with murmur2, which is just what is needed.
        Map<String, Future<RecordMetadata>> sent = new LinkedHashMap<>();
        try (KafkaProducer<String, byte[]> producer =
                new KafkaProducer<>(properties, new StringSerializer(), new ByteArraySerializer())) {
            for (int number = 0; number < Integer.parseInt(arguments[4]); number++) {
                String routingKey = UUID.randomUUID().toString();
                String taskId = number % 2 == 0 ? routingKey : routingKey + ".step"; // the first dot ends the key
                byte[] value = submitter.framed(submitter.submission(taskId, arguments[3], number));
                sent.put(taskId, producer.send(new ProducerRecord<>(arguments[2], routingKey, value)));
            }
            for (Map.Entry<String, Future<RecordMetadata>> one : sent.entrySet()) {
                RecordMetadata place = one.getValue().get(); // throws if the brokers did not take it
                System.out.printf(
                        "{\"task_id\": \"%s\", \"partition\": %d, \"offset\": %d}%n",
                        one.getKey(), place.partition(), place.offset());
            }
        }
    }
}
