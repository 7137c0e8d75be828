from geofed_pb.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VersionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VersionReply(_message.Message):
    __slots__ = ("version", "federation")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FEDERATION_FIELD_NUMBER: _ClassVar[int]
    version: str
    federation: str
    def __init__(self, version: _Optional[str] = ..., federation: _Optional[str] = ...) -> None: ...

class PlanRequest(_message.Message):
    __slots__ = ("spec_json", "code_digest", "bundle_digest", "submission")
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    CODE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    spec_json: str
    code_digest: str
    bundle_digest: str
    submission: _common_pb2.Submission
    def __init__(self, spec_json: _Optional[str] = ..., code_digest: _Optional[str] = ..., bundle_digest: _Optional[str] = ..., submission: _Optional[_Union[_common_pb2.Submission, _Mapping]] = ...) -> None: ...

class PlanReply(_message.Message):
    __slots__ = ("plan_json", "admissible")
    PLAN_JSON_FIELD_NUMBER: _ClassVar[int]
    ADMISSIBLE_FIELD_NUMBER: _ClassVar[int]
    plan_json: str
    admissible: bool
    def __init__(self, plan_json: _Optional[str] = ..., admissible: bool = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("request_id", "spec_json", "bundle_digest", "submission")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    spec_json: str
    bundle_digest: str
    submission: _common_pb2.Submission
    def __init__(self, request_id: _Optional[str] = ..., spec_json: _Optional[str] = ..., bundle_digest: _Optional[str] = ..., submission: _Optional[_Union[_common_pb2.Submission, _Mapping]] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ("job", "created")
    JOB_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    job: Job
    created: bool
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., created: bool = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("request_id", "spec_json", "bundle_digest", "memories_mb", "submission")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MEMORIES_MB_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    spec_json: str
    bundle_digest: str
    memories_mb: _containers.RepeatedScalarFieldContainer[int]
    submission: _common_pb2.Submission
    def __init__(self, request_id: _Optional[str] = ..., spec_json: _Optional[str] = ..., bundle_digest: _Optional[str] = ..., memories_mb: _Optional[_Iterable[int]] = ..., submission: _Optional[_Union[_common_pb2.Submission, _Mapping]] = ...) -> None: ...

class ProfileNews(_message.Message):
    __slots__ = ("region", "text", "result_json")
    REGION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RESULT_JSON_FIELD_NUMBER: _ClassVar[int]
    region: str
    text: str
    result_json: str
    def __init__(self, region: _Optional[str] = ..., text: _Optional[str] = ..., result_json: _Optional[str] = ...) -> None: ...

class JobRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("id", "name", "state", "condition", "created_at", "started_at", "finished_at", "spec_json", "plan_json", "result_json", "error", "partitions", "rounds", "links", "deadline_at", "user", "copies", "initial_model", "successor", "expected_seconds", "shared_with", "models", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    PLAN_JSON_FIELD_NUMBER: _ClassVar[int]
    RESULT_JSON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_AT_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    INITIAL_MODEL_FIELD_NUMBER: _ClassVar[int]
    SUCCESSOR_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SHARED_WITH_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    state: str
    condition: str
    created_at: float
    started_at: float
    finished_at: float
    spec_json: str
    plan_json: str
    result_json: str
    error: _common_pb2.Error
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionStatus]
    rounds: int
    links: _containers.RepeatedCompositeFieldContainer[WanLink]
    deadline_at: float
    user: str
    copies: _containers.RepeatedCompositeFieldContainer[ShardCopy]
    initial_model: InitialModel
    successor: str
    expected_seconds: float
    shared_with: _containers.RepeatedScalarFieldContainer[str]
    models: _containers.RepeatedCompositeFieldContainer[KeptModel]
    labels: _containers.ScalarMap[str, str]
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., state: _Optional[str] = ..., condition: _Optional[str] = ..., created_at: _Optional[float] = ..., started_at: _Optional[float] = ..., finished_at: _Optional[float] = ..., spec_json: _Optional[str] = ..., plan_json: _Optional[str] = ..., result_json: _Optional[str] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., partitions: _Optional[_Iterable[_Union[PartitionStatus, _Mapping]]] = ..., rounds: _Optional[int] = ..., links: _Optional[_Iterable[_Union[WanLink, _Mapping]]] = ..., deadline_at: _Optional[float] = ..., user: _Optional[str] = ..., copies: _Optional[_Iterable[_Union[ShardCopy, _Mapping]]] = ..., initial_model: _Optional[_Union[InitialModel, _Mapping]] = ..., successor: _Optional[str] = ..., expected_seconds: _Optional[float] = ..., shared_with: _Optional[_Iterable[str]] = ..., models: _Optional[_Iterable[_Union[KeptModel, _Mapping]]] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class KeptModel(_message.Message):
    __slots__ = ("round", "digest", "bytes", "metrics", "best")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    round: int
    digest: str
    bytes: int
    metrics: _containers.ScalarMap[str, float]
    best: bool
    def __init__(self, round: _Optional[int] = ..., digest: _Optional[str] = ..., bytes: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., best: bool = ...) -> None: ...

class InitialModel(_message.Message):
    __slots__ = ("job", "digest", "bytes", "round", "file", "partial", "uri", "adapter", "adapter_bytes", "adapter_file")
    JOB_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FILE_FIELD_NUMBER: _ClassVar[int]
    job: str
    digest: str
    bytes: int
    round: int
    file: str
    partial: bool
    uri: str
    adapter: str
    adapter_bytes: int
    adapter_file: str
    def __init__(self, job: _Optional[str] = ..., digest: _Optional[str] = ..., bytes: _Optional[int] = ..., round: _Optional[int] = ..., file: _Optional[str] = ..., partial: bool = ..., uri: _Optional[str] = ..., adapter: _Optional[str] = ..., adapter_bytes: _Optional[int] = ..., adapter_file: _Optional[str] = ...) -> None: ...

class ShardCopy(_message.Message):
    __slots__ = ("source", "destination", "state", "condition", "bytes", "sent_bytes", "money")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MONEY_FIELD_NUMBER: _ClassVar[int]
    source: str
    destination: str
    state: str
    condition: str
    bytes: int
    sent_bytes: int
    money: _containers.RepeatedCompositeFieldContainer[_common_pb2.Money]
    def __init__(self, source: _Optional[str] = ..., destination: _Optional[str] = ..., state: _Optional[str] = ..., condition: _Optional[str] = ..., bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., money: _Optional[_Iterable[_Union[_common_pb2.Money, _Mapping]]] = ...) -> None: ...

class WanLink(_message.Message):
    __slots__ = ("source", "destination", "state", "rtt_ms", "goodput_mbps", "streams", "codec", "interval", "sent_bytes", "received_bytes", "staleness", "refused")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_MBPS_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    source: str
    destination: str
    state: str
    rtt_ms: float
    goodput_mbps: float
    streams: int
    codec: str
    interval: int
    sent_bytes: int
    received_bytes: int
    staleness: float
    refused: int
    def __init__(self, source: _Optional[str] = ..., destination: _Optional[str] = ..., state: _Optional[str] = ..., rtt_ms: _Optional[float] = ..., goodput_mbps: _Optional[float] = ..., streams: _Optional[int] = ..., codec: _Optional[str] = ..., interval: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ..., staleness: _Optional[float] = ..., refused: _Optional[int] = ...) -> None: ...

class PartitionStatus(_message.Message):
    __slots__ = ("region", "state", "epoch", "round", "step", "samples", "loss", "workers", "condition", "metrics", "sent_bytes", "money", "last_contact", "samples_per_second", "preemptible", "usage", "logged", "epsilon")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class SentBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REGION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MONEY_FIELD_NUMBER: _ClassVar[int]
    LAST_CONTACT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIBLE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    LOGGED_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    region: str
    state: str
    epoch: int
    round: int
    step: int
    samples: int
    loss: float
    workers: int
    condition: str
    metrics: _containers.ScalarMap[str, float]
    sent_bytes: _containers.ScalarMap[str, int]
    money: _containers.RepeatedCompositeFieldContainer[_common_pb2.Money]
    last_contact: float
    samples_per_second: float
    preemptible: bool
    usage: _common_pb2.Usage
    logged: _common_pb2.Logged
    epsilon: float
    def __init__(self, region: _Optional[str] = ..., state: _Optional[str] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., step: _Optional[int] = ..., samples: _Optional[int] = ..., loss: _Optional[float] = ..., workers: _Optional[int] = ..., condition: _Optional[str] = ..., metrics: _Optional[_Mapping[str, float]] = ..., sent_bytes: _Optional[_Mapping[str, int]] = ..., money: _Optional[_Iterable[_Union[_common_pb2.Money, _Mapping]]] = ..., last_contact: _Optional[float] = ..., samples_per_second: _Optional[float] = ..., preemptible: bool = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., logged: _Optional[_Union[_common_pb2.Logged, _Mapping]] = ..., epsilon: _Optional[float] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ("all", "limit", "after")
    ALL_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    all: bool
    limit: int
    after: str
    def __init__(self, all: bool = ..., limit: _Optional[int] = ..., after: _Optional[str] = ...) -> None: ...

class ListJobsReply(_message.Message):
    __slots__ = ("jobs", "more", "occupied")
    class OccupiedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    JOBS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    OCCUPIED_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    more: bool
    occupied: _containers.ScalarMap[str, int]
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ..., more: bool = ..., occupied: _Optional[_Mapping[str, int]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("job", "cursor", "follow")
    JOB_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    job: str
    cursor: int
    follow: bool
    def __init__(self, job: _Optional[str] = ..., cursor: _Optional[int] = ..., follow: bool = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("cursor", "at", "job", "region", "kind", "text", "data_json", "terminal")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DATA_JSON_FIELD_NUMBER: _ClassVar[int]
    TERMINAL_FIELD_NUMBER: _ClassVar[int]
    cursor: int
    at: float
    job: str
    region: str
    kind: str
    text: str
    data_json: str
    terminal: bool
    def __init__(self, cursor: _Optional[int] = ..., at: _Optional[float] = ..., job: _Optional[str] = ..., region: _Optional[str] = ..., kind: _Optional[str] = ..., text: _Optional[str] = ..., data_json: _Optional[str] = ..., terminal: bool = ...) -> None: ...

class LogsRequest(_message.Message):
    __slots__ = ("job", "region", "cursor", "follow", "tail")
    JOB_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    job: str
    region: str
    cursor: int
    follow: bool
    tail: int
    def __init__(self, job: _Optional[str] = ..., region: _Optional[str] = ..., cursor: _Optional[int] = ..., follow: bool = ..., tail: _Optional[int] = ...) -> None: ...

class LogLine(_message.Message):
    __slots__ = ("cursor", "at", "region", "source", "text")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    cursor: int
    at: float
    region: str
    source: str
    text: str
    def __init__(self, cursor: _Optional[int] = ..., at: _Optional[float] = ..., region: _Optional[str] = ..., source: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("job", "workers", "reason")
    class WorkersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    job: str
    workers: _containers.ScalarMap[str, int]
    reason: str
    def __init__(self, job: _Optional[str] = ..., workers: _Optional[_Mapping[str, int]] = ..., reason: _Optional[str] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("job", "reason")
    JOB_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    job: str
    reason: str
    def __init__(self, job: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class FinishRequest(_message.Message):
    __slots__ = ("job", "reason")
    JOB_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    job: str
    reason: str
    def __init__(self, job: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ReplanRequest(_message.Message):
    __slots__ = ("job", "reason")
    JOB_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    job: str
    reason: str
    def __init__(self, job: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("request_id", "job")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    job: str
    def __init__(self, request_id: _Optional[str] = ..., job: _Optional[str] = ...) -> None: ...

class RenameRequest(_message.Message):
    __slots__ = ("job", "name")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    job: str
    name: str
    def __init__(self, job: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ShareRequest(_message.Message):
    __slots__ = ("job", "user", "end")
    JOB_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    job: str
    user: str
    end: bool
    def __init__(self, job: _Optional[str] = ..., user: _Optional[str] = ..., end: bool = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class DeleteReply(_message.Message):
    __slots__ = ("job", "deleted_at", "deleted_by", "regions")
    JOB_FIELD_NUMBER: _ClassVar[int]
    DELETED_AT_FIELD_NUMBER: _ClassVar[int]
    DELETED_BY_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    job: str
    deleted_at: float
    deleted_by: str
    regions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, job: _Optional[str] = ..., deleted_at: _Optional[float] = ..., deleted_by: _Optional[str] = ..., regions: _Optional[_Iterable[str]] = ...) -> None: ...

class StorageRequest(_message.Message):
    __slots__ = ("job", "jobs")
    JOB_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    job: str
    jobs: int
    def __init__(self, job: _Optional[str] = ..., jobs: _Optional[int] = ...) -> None: ...

class StorageReply(_message.Message):
    __slots__ = ("kinds", "jobs", "database_bytes", "free_bytes")
    KINDS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    DATABASE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    kinds: _containers.RepeatedCompositeFieldContainer[StoredKind]
    jobs: _containers.RepeatedCompositeFieldContainer[StoredJob]
    database_bytes: int
    free_bytes: int
    def __init__(self, kinds: _Optional[_Iterable[_Union[StoredKind, _Mapping]]] = ..., jobs: _Optional[_Iterable[_Union[StoredJob, _Mapping]]] = ..., database_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ...) -> None: ...

class StoredKind(_message.Message):
    __slots__ = ("kind", "count", "bytes", "due_count", "due_bytes", "next_at", "keep_seconds")
    KIND_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DUE_COUNT_FIELD_NUMBER: _ClassVar[int]
    DUE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NEXT_AT_FIELD_NUMBER: _ClassVar[int]
    KEEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    count: int
    bytes: int
    due_count: int
    due_bytes: int
    next_at: float
    keep_seconds: float
    def __init__(self, kind: _Optional[str] = ..., count: _Optional[int] = ..., bytes: _Optional[int] = ..., due_count: _Optional[int] = ..., due_bytes: _Optional[int] = ..., next_at: _Optional[float] = ..., keep_seconds: _Optional[float] = ...) -> None: ...

class StoredJob(_message.Message):
    __slots__ = ("job", "state", "ended_at", "bytes")
    class BytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    job: str
    state: str
    ended_at: float
    bytes: _containers.ScalarMap[str, int]
    def __init__(self, job: _Optional[str] = ..., state: _Optional[str] = ..., ended_at: _Optional[float] = ..., bytes: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ListRegionsRequest(_message.Message):
    __slots__ = ("after", "paged")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    PAGED_FIELD_NUMBER: _ClassVar[int]
    after: str
    paged: bool
    def __init__(self, after: _Optional[str] = ..., paged: bool = ...) -> None: ...

class ListRegionsReply(_message.Message):
    __slots__ = ("regions", "more")
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    regions: _containers.RepeatedCompositeFieldContainer[Region]
    more: bool
    def __init__(self, regions: _Optional[_Iterable[_Union[Region, _Mapping]]] = ..., more: bool = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("name", "cloud", "state", "condition", "last_contact", "agent_version", "catalogue_json", "certificate_expires", "measured_links")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CLOUD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    LAST_CONTACT_FIELD_NUMBER: _ClassVar[int]
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CATALOGUE_JSON_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_EXPIRES_FIELD_NUMBER: _ClassVar[int]
    MEASURED_LINKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    cloud: str
    state: str
    condition: str
    last_contact: float
    agent_version: str
    catalogue_json: str
    certificate_expires: float
    measured_links: _containers.RepeatedCompositeFieldContainer[MeasuredLink]
    def __init__(self, name: _Optional[str] = ..., cloud: _Optional[str] = ..., state: _Optional[str] = ..., condition: _Optional[str] = ..., last_contact: _Optional[float] = ..., agent_version: _Optional[str] = ..., catalogue_json: _Optional[str] = ..., certificate_expires: _Optional[float] = ..., measured_links: _Optional[_Iterable[_Union[MeasuredLink, _Mapping]]] = ...) -> None: ...

class MeasuredLink(_message.Message):
    __slots__ = ("destination", "rtt_ms", "mbps")
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    MBPS_FIELD_NUMBER: _ClassVar[int]
    destination: str
    rtt_ms: float
    mbps: float
    def __init__(self, destination: _Optional[str] = ..., rtt_ms: _Optional[float] = ..., mbps: _Optional[float] = ...) -> None: ...

class InviteRequest(_message.Message):
    __slots__ = ("region", "ttl_seconds")
    REGION_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    region: str
    ttl_seconds: int
    def __init__(self, region: _Optional[str] = ..., ttl_seconds: _Optional[int] = ...) -> None: ...

class InviteReply(_message.Message):
    __slots__ = ("token", "expires")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    token: str
    expires: float
    def __init__(self, token: _Optional[str] = ..., expires: _Optional[float] = ...) -> None: ...

class RotateAuthorityRequest(_message.Message):
    __slots__ = ("force",)
    FORCE_FIELD_NUMBER: _ClassVar[int]
    force: bool
    def __init__(self, force: bool = ...) -> None: ...

class RotateAuthorityReply(_message.Message):
    __slots__ = ("stage", "ca_pem")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    CA_PEM_FIELD_NUMBER: _ClassVar[int]
    stage: str
    ca_pem: str
    def __init__(self, stage: _Optional[str] = ..., ca_pem: _Optional[str] = ...) -> None: ...

class ChangeRegionRequest(_message.Message):
    __slots__ = ("region", "change", "reason", "move")
    class Change(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CHANGE_UNSPECIFIED: _ClassVar[ChangeRegionRequest.Change]
        CHANGE_DRAIN: _ClassVar[ChangeRegionRequest.Change]
        CHANGE_UNDRAIN: _ClassVar[ChangeRegionRequest.Change]
        CHANGE_REVOKE: _ClassVar[ChangeRegionRequest.Change]
        CHANGE_REMOVE: _ClassVar[ChangeRegionRequest.Change]
    CHANGE_UNSPECIFIED: ChangeRegionRequest.Change
    CHANGE_DRAIN: ChangeRegionRequest.Change
    CHANGE_UNDRAIN: ChangeRegionRequest.Change
    CHANGE_REVOKE: ChangeRegionRequest.Change
    CHANGE_REMOVE: ChangeRegionRequest.Change
    REGION_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    region: str
    change: ChangeRegionRequest.Change
    reason: str
    move: bool
    def __init__(self, region: _Optional[str] = ..., change: _Optional[_Union[ChangeRegionRequest.Change, str]] = ..., reason: _Optional[str] = ..., move: bool = ...) -> None: ...

class AddUserRequest(_message.Message):
    __slots__ = ("name", "promised_workers", "role", "token_seconds", "identity")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROMISED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    name: str
    promised_workers: int
    role: str
    token_seconds: float
    identity: str
    def __init__(self, name: _Optional[str] = ..., promised_workers: _Optional[int] = ..., role: _Optional[str] = ..., token_seconds: _Optional[float] = ..., identity: _Optional[str] = ...) -> None: ...

class ChangeUserRequest(_message.Message):
    __slots__ = ("name", "promised_workers", "no_quota", "new_token", "new_key", "role", "token_seconds", "identity")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROMISED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    NO_QUOTA_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NEW_KEY_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    name: str
    promised_workers: int
    no_quota: bool
    new_token: bool
    new_key: bool
    role: str
    token_seconds: float
    identity: str
    def __init__(self, name: _Optional[str] = ..., promised_workers: _Optional[int] = ..., no_quota: bool = ..., new_token: bool = ..., new_key: bool = ..., role: _Optional[str] = ..., token_seconds: _Optional[float] = ..., identity: _Optional[str] = ...) -> None: ...

class RemoveUserRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UserReply(_message.Message):
    __slots__ = ("user", "token")
    USER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    user: User
    token: str
    def __init__(self, user: _Optional[_Union[User, _Mapping]] = ..., token: _Optional[str] = ...) -> None: ...

class SignInOptionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SignInOptionsReply(_message.Message):
    __slots__ = ("federation", "issuer", "client_id", "scope")
    FEDERATION_FIELD_NUMBER: _ClassVar[int]
    ISSUER_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    federation: str
    issuer: str
    client_id: str
    scope: str
    def __init__(self, federation: _Optional[str] = ..., issuer: _Optional[str] = ..., client_id: _Optional[str] = ..., scope: _Optional[str] = ...) -> None: ...

class SignInRequest(_message.Message):
    __slots__ = ("id_token",)
    ID_TOKEN_FIELD_NUMBER: _ClassVar[int]
    id_token: str
    def __init__(self, id_token: _Optional[str] = ...) -> None: ...

class SignInReply(_message.Message):
    __slots__ = ("user", "token", "expires_at")
    USER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    user: User
    token: str
    expires_at: float
    def __init__(self, user: _Optional[_Union[User, _Mapping]] = ..., token: _Optional[str] = ..., expires_at: _Optional[float] = ...) -> None: ...

class SignOutRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SignOutReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuditLine(_message.Message):
    __slots__ = ("line",)
    LINE_FIELD_NUMBER: _ClassVar[int]
    line: str
    def __init__(self, line: _Optional[str] = ...) -> None: ...

class AttestReply(_message.Message):
    __slots__ = ("envelope",)
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    envelope: str
    def __init__(self, envelope: _Optional[str] = ...) -> None: ...

class ListUsersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListUsersReply(_message.Message):
    __slots__ = ("users",)
    USERS_FIELD_NUMBER: _ClassVar[int]
    users: _containers.RepeatedCompositeFieldContainer[User]
    def __init__(self, users: _Optional[_Iterable[_Union[User, _Mapping]]] = ...) -> None: ...

class User(_message.Message):
    __slots__ = ("name", "promised_workers", "promised_now", "jobs", "created_at", "public_key", "role", "token_expires_at", "identity", "sign_ins")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROMISED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    PROMISED_NOW_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    SIGN_INS_FIELD_NUMBER: _ClassVar[int]
    name: str
    promised_workers: int
    promised_now: int
    jobs: int
    created_at: float
    public_key: str
    role: str
    token_expires_at: float
    identity: str
    sign_ins: int
    def __init__(self, name: _Optional[str] = ..., promised_workers: _Optional[int] = ..., promised_now: _Optional[int] = ..., jobs: _Optional[int] = ..., created_at: _Optional[float] = ..., public_key: _Optional[str] = ..., role: _Optional[str] = ..., token_expires_at: _Optional[float] = ..., identity: _Optional[str] = ..., sign_ins: _Optional[int] = ...) -> None: ...

class ModelRequest(_message.Message):
    __slots__ = ("job", "offset", "round", "region")
    JOB_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    job: str
    offset: int
    round: int
    region: str
    def __init__(self, job: _Optional[str] = ..., offset: _Optional[int] = ..., round: _Optional[int] = ..., region: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("secret", "csr_pem")
    SECRET_FIELD_NUMBER: _ClassVar[int]
    CSR_PEM_FIELD_NUMBER: _ClassVar[int]
    secret: str
    csr_pem: bytes
    def __init__(self, secret: _Optional[str] = ..., csr_pem: _Optional[bytes] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("region", "certificate_pem", "ca_pem", "agent_port", "federation")
    REGION_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    CA_PEM_FIELD_NUMBER: _ClassVar[int]
    AGENT_PORT_FIELD_NUMBER: _ClassVar[int]
    FEDERATION_FIELD_NUMBER: _ClassVar[int]
    region: str
    certificate_pem: bytes
    ca_pem: bytes
    agent_port: int
    federation: str
    def __init__(self, region: _Optional[str] = ..., certificate_pem: _Optional[bytes] = ..., ca_pem: _Optional[bytes] = ..., agent_port: _Optional[int] = ..., federation: _Optional[str] = ...) -> None: ...
