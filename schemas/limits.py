"""The bounds that every part respects, each with its reason. Sizes in bytes, durations as their name says."""

PAYLOAD_MAX = 256 * 1024  # a record with its envelope stays below the 1 MiB that brokers take by default
RESULT_MAX = 256 * 1024
CHECKPOINT_MAX = 256 * 1024
METADATA_MAX = 4 * 1024  # keys and values together, as UTF-8: it travels with every ready record
JSON_DEPTH_MAX = 64  # nesting of a payload; far below where any JSON parser of a client gives up
JSON_INTEGER_DIGITS_MAX = 1_000  # kept exactly; CPython itself refuses to parse above 4,300
BULK_MAX = 1_000  # tasks in one bulk call: about what one batch of the log takes without delaying others
PAGE_MAX = 500  # rows in one page of a list
SCHEDULE_AHEAD_US_MAX = 100 * 366 * 86_400 * 1_000_000  # a hundred years; beyond is a unit mistaken for another
ATTEMPTS_MAX = 1_000_000
DURATION_MS_MAX = 366 * 86_400 * 1_000  # of a timeout, a lease or a retry delay
BODY_MAX = 512 * 1024  # of a request with one task: a payload in base64, its metadata, and room for white space
BULK_BODY_MAX = 16 * 1024 * 1024  # of a bulk request: what one API process holds of one client at a time
REQUESTS_PENDING_MAX = 100_000  # of one gateway: ten seconds without a decision at the rate one shard decides
