"""The names of what is provisioned: streams, buckets, the object store."""

EVENTS_STREAM = "POLYMORPH_EVT"
JOBS_STREAM = "POLYMORPH_JOBS"
DEAD_LETTERS_STREAM = "POLYMORPH_DLQ"

DESIRED = "desired"
WORKERS = "workers"
LEASES = "leases"
QUARANTINE = "quarantine"
FREEZE = "freeze"
PAUSE = "pause"
ARTIFACTS = "artifacts"

WORKERS_TTL_S = 10.0
LEASES_TTL_S = 15.0
