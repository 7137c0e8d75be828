from geofed_pb.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromAgent(_message.Message):
    __slots__ = ("seq", "hello", "heartbeat", "command_ack", "partition", "happening", "logs", "profile", "capacity")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    COMMAND_ACK_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    HAPPENING_FIELD_NUMBER: _ClassVar[int]
    LOGS_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    seq: int
    hello: Hello
    heartbeat: Heartbeat
    command_ack: CommandAck
    partition: PartitionReport
    happening: Happening
    logs: LogBatch
    profile: ProfileReport
    capacity: CapacityNews
    def __init__(self, seq: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., command_ack: _Optional[_Union[CommandAck, _Mapping]] = ..., partition: _Optional[_Union[PartitionReport, _Mapping]] = ..., happening: _Optional[_Union[Happening, _Mapping]] = ..., logs: _Optional[_Union[LogBatch, _Mapping]] = ..., profile: _Optional[_Union[ProfileReport, _Mapping]] = ..., capacity: _Optional[_Union[CapacityNews, _Mapping]] = ...) -> None: ...

class ToAgent(_message.Message):
    __slots__ = ("seq", "welcome", "lease", "report_ack", "start", "peers", "stop", "publish", "scale", "profile", "send_shard", "probe", "revoked", "keep", "own_model", "audit_head")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    REPORT_ACK_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    SEND_SHARD_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    OWN_MODEL_FIELD_NUMBER: _ClassVar[int]
    AUDIT_HEAD_FIELD_NUMBER: _ClassVar[int]
    seq: int
    welcome: Welcome
    lease: LeaseGrant
    report_ack: ReportAck
    start: StartPartition
    peers: Peers
    stop: StopPartition
    publish: PublishModel
    scale: ScalePartition
    profile: ProfileTask
    send_shard: SendShard
    probe: ProfileTask
    revoked: RevokedCertificates
    keep: KeepModel
    own_model: OwnModel
    audit_head: AuditHead
    def __init__(self, seq: _Optional[int] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., lease: _Optional[_Union[LeaseGrant, _Mapping]] = ..., report_ack: _Optional[_Union[ReportAck, _Mapping]] = ..., start: _Optional[_Union[StartPartition, _Mapping]] = ..., peers: _Optional[_Union[Peers, _Mapping]] = ..., stop: _Optional[_Union[StopPartition, _Mapping]] = ..., publish: _Optional[_Union[PublishModel, _Mapping]] = ..., scale: _Optional[_Union[ScalePartition, _Mapping]] = ..., profile: _Optional[_Union[ProfileTask, _Mapping]] = ..., send_shard: _Optional[_Union[SendShard, _Mapping]] = ..., probe: _Optional[_Union[ProfileTask, _Mapping]] = ..., revoked: _Optional[_Union[RevokedCertificates, _Mapping]] = ..., keep: _Optional[_Union[KeepModel, _Mapping]] = ..., own_model: _Optional[_Union[OwnModel, _Mapping]] = ..., audit_head: _Optional[_Union[AuditHead, _Mapping]] = ...) -> None: ...

class AuditHead(_message.Message):
    __slots__ = ("seq", "hash", "at", "public_key", "signature", "region")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    seq: int
    hash: str
    at: float
    public_key: str
    signature: str
    region: str
    def __init__(self, seq: _Optional[int] = ..., hash: _Optional[str] = ..., at: _Optional[float] = ..., public_key: _Optional[str] = ..., signature: _Optional[str] = ..., region: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("agent_version", "boot_id", "command_cursor", "catalogue_json", "report_cursor", "features")
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    COMMAND_CURSOR_FIELD_NUMBER: _ClassVar[int]
    CATALOGUE_JSON_FIELD_NUMBER: _ClassVar[int]
    REPORT_CURSOR_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    agent_version: str
    boot_id: str
    command_cursor: int
    catalogue_json: str
    report_cursor: int
    features: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, agent_version: _Optional[str] = ..., boot_id: _Optional[str] = ..., command_cursor: _Optional[int] = ..., catalogue_json: _Optional[str] = ..., report_cursor: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("at",)
    AT_FIELD_NUMBER: _ClassVar[int]
    at: float
    def __init__(self, at: _Optional[float] = ...) -> None: ...

class CapacityNews(_message.Message):
    __slots__ = ("preemptible",)
    PREEMPTIBLE_FIELD_NUMBER: _ClassVar[int]
    preemptible: int
    def __init__(self, preemptible: _Optional[int] = ...) -> None: ...

class CommandAck(_message.Message):
    __slots__ = ("seq",)
    SEQ_FIELD_NUMBER: _ClassVar[int]
    seq: int
    def __init__(self, seq: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("lease_seconds", "report_cursor", "session", "at", "revoked")
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REPORT_CURSOR_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    lease_seconds: float
    report_cursor: int
    session: int
    at: float
    revoked: RevokedCertificates
    def __init__(self, lease_seconds: _Optional[float] = ..., report_cursor: _Optional[int] = ..., session: _Optional[int] = ..., at: _Optional[float] = ..., revoked: _Optional[_Union[RevokedCertificates, _Mapping]] = ...) -> None: ...

class RevokedCertificates(_message.Message):
    __slots__ = ("serials", "ca_pem")
    SERIALS_FIELD_NUMBER: _ClassVar[int]
    CA_PEM_FIELD_NUMBER: _ClassVar[int]
    serials: _containers.RepeatedScalarFieldContainer[str]
    ca_pem: bytes
    def __init__(self, serials: _Optional[_Iterable[str]] = ..., ca_pem: _Optional[bytes] = ...) -> None: ...

class LeaseGrant(_message.Message):
    __slots__ = ("lease_seconds",)
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_seconds: float
    def __init__(self, lease_seconds: _Optional[float] = ...) -> None: ...

class ReportAck(_message.Message):
    __slots__ = ("seq",)
    SEQ_FIELD_NUMBER: _ClassVar[int]
    seq: int
    def __init__(self, seq: _Optional[int] = ...) -> None: ...

class StartPartition(_message.Message):
    __slots__ = ("job", "region", "epoch", "task", "plan", "regions", "resumed", "traceparent")
    JOB_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    job: str
    region: str
    epoch: int
    task: TaskRef
    plan: PartitionPlan
    regions: _containers.RepeatedScalarFieldContainer[str]
    resumed: bool
    traceparent: str
    def __init__(self, job: _Optional[str] = ..., region: _Optional[str] = ..., epoch: _Optional[int] = ..., task: _Optional[_Union[TaskRef, _Mapping]] = ..., plan: _Optional[_Union[PartitionPlan, _Mapping]] = ..., regions: _Optional[_Iterable[str]] = ..., resumed: bool = ..., traceparent: _Optional[str] = ...) -> None: ...

class TaskRef(_message.Message):
    __slots__ = ("bundle_digest", "module", "config_json", "dataset", "learning_rate", "initial_model", "keeps_base", "clip_norm", "submission", "env", "precision", "accumulate", "local", "initial_job", "initial_holds", "secrets", "requirements", "clients", "initial_uri", "evaluates_only", "image", "initial_adapter", "compile", "gpus", "sharding")
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    BUNDLE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    INITIAL_MODEL_FIELD_NUMBER: _ClassVar[int]
    KEEPS_BASE_FIELD_NUMBER: _ClassVar[int]
    CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    INITIAL_JOB_FIELD_NUMBER: _ClassVar[int]
    INITIAL_HOLDS_FIELD_NUMBER: _ClassVar[int]
    SECRETS_FIELD_NUMBER: _ClassVar[int]
    REQUIREMENTS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    INITIAL_URI_FIELD_NUMBER: _ClassVar[int]
    EVALUATES_ONLY_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    INITIAL_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    COMPILE_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    SHARDING_FIELD_NUMBER: _ClassVar[int]
    bundle_digest: str
    module: str
    config_json: str
    dataset: str
    learning_rate: LearningRate
    initial_model: str
    keeps_base: bool
    clip_norm: float
    submission: _common_pb2.Submission
    env: _containers.ScalarMap[str, str]
    precision: str
    accumulate: int
    local: _containers.RepeatedScalarFieldContainer[str]
    initial_job: str
    initial_holds: str
    secrets: _containers.RepeatedScalarFieldContainer[str]
    requirements: str
    clients: ClientRounds
    initial_uri: str
    evaluates_only: bool
    image: str
    initial_adapter: str
    compile: bool
    gpus: str
    sharding: str
    def __init__(self, bundle_digest: _Optional[str] = ..., module: _Optional[str] = ..., config_json: _Optional[str] = ..., dataset: _Optional[str] = ..., learning_rate: _Optional[_Union[LearningRate, _Mapping]] = ..., initial_model: _Optional[str] = ..., keeps_base: bool = ..., clip_norm: _Optional[float] = ..., submission: _Optional[_Union[_common_pb2.Submission, _Mapping]] = ..., env: _Optional[_Mapping[str, str]] = ..., precision: _Optional[str] = ..., accumulate: _Optional[int] = ..., local: _Optional[_Iterable[str]] = ..., initial_job: _Optional[str] = ..., initial_holds: _Optional[str] = ..., secrets: _Optional[_Iterable[str]] = ..., requirements: _Optional[str] = ..., clients: _Optional[_Union[ClientRounds, _Mapping]] = ..., initial_uri: _Optional[str] = ..., evaluates_only: bool = ..., image: _Optional[str] = ..., initial_adapter: _Optional[str] = ..., compile: bool = ..., gpus: _Optional[str] = ..., sharding: _Optional[str] = ...) -> None: ...

class ClientRounds(_message.Message):
    __slots__ = ("fraction", "least", "epochs", "steps", "batch")
    FRACTION_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    fraction: float
    least: int
    epochs: int
    steps: int
    batch: int
    def __init__(self, fraction: _Optional[float] = ..., least: _Optional[int] = ..., epochs: _Optional[int] = ..., steps: _Optional[int] = ..., batch: _Optional[int] = ...) -> None: ...

class LearningRate(_message.Message):
    __slots__ = ("schedule", "warmup", "floor", "begin", "scale")
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    WARMUP_FIELD_NUMBER: _ClassVar[int]
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    schedule: str
    warmup: float
    floor: float
    begin: float
    scale: float
    def __init__(self, schedule: _Optional[str] = ..., warmup: _Optional[float] = ..., floor: _Optional[float] = ..., begin: _Optional[float] = ..., scale: _Optional[float] = ...) -> None: ...

class PartitionPlan(_message.Message):
    __slots__ = ("workers", "batch", "steps_per_round", "rounds", "seed", "memory_mb", "slice_seconds", "collective", "channel", "wan_policy", "codec", "evaluate_every", "wan_settings", "topology", "neighbours", "shares", "merging", "merging_codec", "pipeline", "shards", "evaluation_batch", "local_steps", "data_shares")
    class WanSettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class SharesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class MergingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class LocalStepsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class DataSharesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_ROUND_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_MB_FIELD_NUMBER: _ClassVar[int]
    SLICE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    WAN_POLICY_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_EVERY_FIELD_NUMBER: _ClassVar[int]
    WAN_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    NEIGHBOURS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    MERGING_FIELD_NUMBER: _ClassVar[int]
    MERGING_CODEC_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_BATCH_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    DATA_SHARES_FIELD_NUMBER: _ClassVar[int]
    workers: int
    batch: int
    steps_per_round: int
    rounds: int
    seed: int
    memory_mb: int
    slice_seconds: float
    collective: str
    channel: str
    wan_policy: str
    codec: str
    evaluate_every: int
    wan_settings: _containers.ScalarMap[str, float]
    topology: str
    neighbours: _containers.RepeatedCompositeFieldContainer[RegionPair]
    shares: _containers.ScalarMap[str, float]
    merging: _containers.ScalarMap[str, float]
    merging_codec: str
    pipeline: Pipeline
    shards: _containers.RepeatedCompositeFieldContainer[ShardRef]
    evaluation_batch: int
    local_steps: _containers.ScalarMap[str, float]
    data_shares: _containers.ScalarMap[str, float]
    def __init__(self, workers: _Optional[int] = ..., batch: _Optional[int] = ..., steps_per_round: _Optional[int] = ..., rounds: _Optional[int] = ..., seed: _Optional[int] = ..., memory_mb: _Optional[int] = ..., slice_seconds: _Optional[float] = ..., collective: _Optional[str] = ..., channel: _Optional[str] = ..., wan_policy: _Optional[str] = ..., codec: _Optional[str] = ..., evaluate_every: _Optional[int] = ..., wan_settings: _Optional[_Mapping[str, float]] = ..., topology: _Optional[str] = ..., neighbours: _Optional[_Iterable[_Union[RegionPair, _Mapping]]] = ..., shares: _Optional[_Mapping[str, float]] = ..., merging: _Optional[_Mapping[str, float]] = ..., merging_codec: _Optional[str] = ..., pipeline: _Optional[_Union[Pipeline, _Mapping]] = ..., shards: _Optional[_Iterable[_Union[ShardRef, _Mapping]]] = ..., evaluation_batch: _Optional[int] = ..., local_steps: _Optional[_Mapping[str, float]] = ..., data_shares: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ShardRef(_message.Message):
    __slots__ = ("region", "bytes")
    REGION_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    region: str
    bytes: int
    def __init__(self, region: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class Pipeline(_message.Message):
    __slots__ = ("stages", "degree", "micro_batch", "order", "activation_codec")
    STAGES_FIELD_NUMBER: _ClassVar[int]
    DEGREE_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_CODEC_FIELD_NUMBER: _ClassVar[int]
    stages: _containers.RepeatedCompositeFieldContainer[Stage]
    degree: int
    micro_batch: int
    order: str
    activation_codec: str
    def __init__(self, stages: _Optional[_Iterable[_Union[Stage, _Mapping]]] = ..., degree: _Optional[int] = ..., micro_batch: _Optional[int] = ..., order: _Optional[str] = ..., activation_codec: _Optional[str] = ...) -> None: ...

class Stage(_message.Message):
    __slots__ = ("first_layer", "last_layer", "rematerialise", "memory_mb")
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    REMATERIALISE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_MB_FIELD_NUMBER: _ClassVar[int]
    first_layer: int
    last_layer: int
    rematerialise: bool
    memory_mb: int
    def __init__(self, first_layer: _Optional[int] = ..., last_layer: _Optional[int] = ..., rematerialise: bool = ..., memory_mb: _Optional[int] = ...) -> None: ...

class RegionPair(_message.Message):
    __slots__ = ("a", "b")
    A_FIELD_NUMBER: _ClassVar[int]
    B_FIELD_NUMBER: _ClassVar[int]
    a: str
    b: str
    def __init__(self, a: _Optional[str] = ..., b: _Optional[str] = ...) -> None: ...

class Peers(_message.Message):
    __slots__ = ("job", "epoch", "peers", "routes", "neighbours", "former", "finish", "halt")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    NEIGHBOURS_FIELD_NUMBER: _ClassVar[int]
    FORMER_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    HALT_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: int
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    routes: int
    neighbours: _containers.RepeatedCompositeFieldContainer[RegionPair]
    former: _containers.RepeatedCompositeFieldContainer[RegionPair]
    finish: bool
    halt: bool
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., routes: _Optional[int] = ..., neighbours: _Optional[_Iterable[_Union[RegionPair, _Mapping]]] = ..., former: _Optional[_Iterable[_Union[RegionPair, _Mapping]]] = ..., finish: bool = ..., halt: bool = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("region", "epoch", "address", "seen", "unsigned")
    REGION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    UNSIGNED_FIELD_NUMBER: _ClassVar[int]
    region: str
    epoch: int
    address: str
    seen: str
    unsigned: bool
    def __init__(self, region: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., seen: _Optional[str] = ..., unsigned: bool = ...) -> None: ...

class StopPartition(_message.Message):
    __slots__ = ("job", "epoch", "reason", "discard", "deleted", "bundle_digest")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DISCARD_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: int
    reason: str
    discard: bool
    deleted: bool
    bundle_digest: str
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[int] = ..., reason: _Optional[str] = ..., discard: bool = ..., deleted: bool = ..., bundle_digest: _Optional[str] = ...) -> None: ...

class SendShard(_message.Message):
    __slots__ = ("job", "epoch", "dataset", "to", "address", "seen")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: int
    dataset: str
    to: str
    address: str
    seen: str
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[int] = ..., dataset: _Optional[str] = ..., to: _Optional[str] = ..., address: _Optional[str] = ..., seen: _Optional[str] = ...) -> None: ...

class ScalePartition(_message.Message):
    __slots__ = ("job", "epoch", "workers", "reason", "batch", "preemptible", "learning_rate", "order")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIBLE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: int
    workers: int
    reason: str
    batch: int
    preemptible: bool
    learning_rate: float
    order: int
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[int] = ..., workers: _Optional[int] = ..., reason: _Optional[str] = ..., batch: _Optional[int] = ..., preemptible: bool = ..., learning_rate: _Optional[float] = ..., order: _Optional[int] = ...) -> None: ...

class ProfileTask(_message.Message):
    __slots__ = ("id", "region", "task", "batch", "seed", "memories_mb", "limit_seconds", "wait_seconds", "evaluation_batch", "labels", "labels_only")
    ID_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MEMORIES_MB_FIELD_NUMBER: _ClassVar[int]
    LIMIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_BATCH_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    LABELS_ONLY_FIELD_NUMBER: _ClassVar[int]
    id: str
    region: str
    task: TaskRef
    batch: int
    seed: int
    memories_mb: _containers.RepeatedScalarFieldContainer[int]
    limit_seconds: float
    wait_seconds: float
    evaluation_batch: int
    labels: bool
    labels_only: bool
    def __init__(self, id: _Optional[str] = ..., region: _Optional[str] = ..., task: _Optional[_Union[TaskRef, _Mapping]] = ..., batch: _Optional[int] = ..., seed: _Optional[int] = ..., memories_mb: _Optional[_Iterable[int]] = ..., limit_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., evaluation_batch: _Optional[int] = ..., labels: bool = ..., labels_only: bool = ...) -> None: ...

class KeepModel(_message.Message):
    __slots__ = ("job", "epoch", "round")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: int
    round: int
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class OwnModel(_message.Message):
    __slots__ = ("id", "region", "job")
    ID_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    id: str
    region: str
    job: str
    def __init__(self, id: _Optional[str] = ..., region: _Optional[str] = ..., job: _Optional[str] = ...) -> None: ...

class PublishModel(_message.Message):
    __slots__ = ("job", "epoch")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: int
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class PartitionReport(_message.Message):
    __slots__ = ("job", "epoch", "state", "condition", "ps_address", "round", "step", "samples", "loss", "model_digest", "blob_digest", "error", "workers", "attempt", "preempted", "scale_order", "shard_address", "shards_here", "meter", "totals", "evaluation", "speed", "exchange", "links", "round_loss", "ps_signs", "keeps_models", "kept", "logged", "usage", "time", "privacy", "audit_head", "data")
    class LinksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: LinkReport
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[LinkReport, _Mapping]] = ...) -> None: ...
    class DataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    PS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOB_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    SCALE_ORDER_FIELD_NUMBER: _ClassVar[int]
    SHARD_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_HERE_FIELD_NUMBER: _ClassVar[int]
    METER_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    ROUND_LOSS_FIELD_NUMBER: _ClassVar[int]
    PS_SIGNS_FIELD_NUMBER: _ClassVar[int]
    KEEPS_MODELS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    LOGGED_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    PRIVACY_FIELD_NUMBER: _ClassVar[int]
    AUDIT_HEAD_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: int
    state: str
    condition: str
    ps_address: str
    round: int
    step: int
    samples: int
    loss: float
    model_digest: str
    blob_digest: str
    error: _common_pb2.Error
    workers: int
    attempt: int
    preempted: bool
    scale_order: int
    shard_address: str
    shards_here: bool
    meter: int
    totals: MeterTotals
    evaluation: Evaluation
    speed: Speed
    exchange: WanExchange
    links: _containers.MessageMap[str, LinkReport]
    round_loss: float
    ps_signs: bool
    keeps_models: bool
    kept: UploadedModel
    logged: _common_pb2.Logged
    usage: _common_pb2.Usage
    time: _common_pb2.RoundTime
    privacy: Privacy
    audit_head: AuditHead
    data: _containers.ScalarMap[str, str]
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[int] = ..., state: _Optional[str] = ..., condition: _Optional[str] = ..., ps_address: _Optional[str] = ..., round: _Optional[int] = ..., step: _Optional[int] = ..., samples: _Optional[int] = ..., loss: _Optional[float] = ..., model_digest: _Optional[str] = ..., blob_digest: _Optional[str] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., workers: _Optional[int] = ..., attempt: _Optional[int] = ..., preempted: bool = ..., scale_order: _Optional[int] = ..., shard_address: _Optional[str] = ..., shards_here: bool = ..., meter: _Optional[int] = ..., totals: _Optional[_Union[MeterTotals, _Mapping]] = ..., evaluation: _Optional[_Union[Evaluation, _Mapping]] = ..., speed: _Optional[_Union[Speed, _Mapping]] = ..., exchange: _Optional[_Union[WanExchange, _Mapping]] = ..., links: _Optional[_Mapping[str, LinkReport]] = ..., round_loss: _Optional[float] = ..., ps_signs: bool = ..., keeps_models: bool = ..., kept: _Optional[_Union[UploadedModel, _Mapping]] = ..., logged: _Optional[_Union[_common_pb2.Logged, _Mapping]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., time: _Optional[_Union[_common_pb2.RoundTime, _Mapping]] = ..., privacy: _Optional[_Union[Privacy, _Mapping]] = ..., audit_head: _Optional[_Union[AuditHead, _Mapping]] = ..., data: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Privacy(_message.Message):
    __slots__ = ("epsilon", "delta", "releases")
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    epsilon: float
    delta: float
    releases: int
    def __init__(self, epsilon: _Optional[float] = ..., delta: _Optional[float] = ..., releases: _Optional[int] = ...) -> None: ...

class UploadedModel(_message.Message):
    __slots__ = ("round", "blob_digest", "error")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BLOB_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    round: int
    blob_digest: str
    error: str
    def __init__(self, round: _Optional[int] = ..., blob_digest: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class MeterTotals(_message.Message):
    __slots__ = ("money", "sent_bytes", "received_bytes")
    class SentBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ReceivedBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MONEY_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    money: _containers.RepeatedCompositeFieldContainer[_common_pb2.Money]
    sent_bytes: _containers.ScalarMap[str, int]
    received_bytes: _containers.ScalarMap[str, int]
    def __init__(self, money: _Optional[_Iterable[_Union[_common_pb2.Money, _Mapping]]] = ..., sent_bytes: _Optional[_Mapping[str, int]] = ..., received_bytes: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("metrics", "samples", "round", "error", "histograms")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class HistogramsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _common_pb2.Histogram
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_common_pb2.Histogram, _Mapping]] = ...) -> None: ...
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    HISTOGRAMS_FIELD_NUMBER: _ClassVar[int]
    metrics: _containers.ScalarMap[str, float]
    samples: int
    round: int
    error: str
    histograms: _containers.MessageMap[str, _common_pb2.Histogram]
    def __init__(self, metrics: _Optional[_Mapping[str, float]] = ..., samples: _Optional[int] = ..., round: _Optional[int] = ..., error: _Optional[str] = ..., histograms: _Optional[_Mapping[str, _common_pb2.Histogram]] = ...) -> None: ...

class Speed(_message.Message):
    __slots__ = ("samples_per_second", "round_samples_per_second", "step_seconds", "merge_seconds", "compute_seconds", "wait_seconds", "merged_by")
    SAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ROUND_SAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MERGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MERGED_BY_FIELD_NUMBER: _ClassVar[int]
    samples_per_second: float
    round_samples_per_second: float
    step_seconds: float
    merge_seconds: float
    compute_seconds: float
    wait_seconds: float
    merged_by: str
    def __init__(self, samples_per_second: _Optional[float] = ..., round_samples_per_second: _Optional[float] = ..., step_seconds: _Optional[float] = ..., merge_seconds: _Optional[float] = ..., compute_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., merged_by: _Optional[str] = ...) -> None: ...

class WanExchange(_message.Message):
    __slots__ = ("applied_updates", "staleness", "refused", "interval", "codec", "update_bytes", "routes", "suspicion")
    class StalenessEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class SuspicionEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    APPLIED_UPDATES_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    UPDATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    SUSPICION_FIELD_NUMBER: _ClassVar[int]
    applied_updates: int
    staleness: _containers.ScalarMap[str, float]
    refused: _containers.ScalarMap[str, int]
    interval: int
    codec: str
    update_bytes: int
    routes: int
    suspicion: _containers.ScalarMap[str, int]
    def __init__(self, applied_updates: _Optional[int] = ..., staleness: _Optional[_Mapping[str, float]] = ..., refused: _Optional[_Mapping[str, int]] = ..., interval: _Optional[int] = ..., codec: _Optional[str] = ..., update_bytes: _Optional[int] = ..., routes: _Optional[int] = ..., suspicion: _Optional[_Mapping[str, int]] = ...) -> None: ...

class LinkReport(_message.Message):
    __slots__ = ("rtt_ms", "mbps", "streams", "down")
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    MBPS_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    DOWN_FIELD_NUMBER: _ClassVar[int]
    rtt_ms: float
    mbps: float
    streams: int
    down: bool
    def __init__(self, rtt_ms: _Optional[float] = ..., mbps: _Optional[float] = ..., streams: _Optional[int] = ..., down: bool = ...) -> None: ...

class ProfileReport(_message.Message):
    __slots__ = ("id", "condition", "profile_json", "error", "weight", "usd", "model_digest")
    ID_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    PROFILE_JSON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    USD_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    id: str
    condition: str
    profile_json: str
    error: _common_pb2.Error
    weight: TaskWeight
    usd: float
    model_digest: str
    def __init__(self, id: _Optional[str] = ..., condition: _Optional[str] = ..., profile_json: _Optional[str] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., weight: _Optional[_Union[TaskWeight, _Mapping]] = ..., usd: _Optional[float] = ..., model_digest: _Optional[str] = ...) -> None: ...

class TaskWeight(_message.Message):
    __slots__ = ("parameters", "model_bytes", "steps", "start_seconds", "usd", "note", "last", "held_bytes", "batch_norms", "labels", "samples")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    START_SECONDS_FIELD_NUMBER: _ClassVar[int]
    USD_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    BATCH_NORMS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    parameters: int
    model_bytes: int
    steps: _containers.RepeatedCompositeFieldContainer[TimedStep]
    start_seconds: float
    usd: float
    note: str
    last: bool
    held_bytes: int
    batch_norms: _containers.RepeatedScalarFieldContainer[str]
    labels: _containers.ScalarMap[int, int]
    samples: int
    def __init__(self, parameters: _Optional[int] = ..., model_bytes: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[TimedStep, _Mapping]]] = ..., start_seconds: _Optional[float] = ..., usd: _Optional[float] = ..., note: _Optional[str] = ..., last: bool = ..., held_bytes: _Optional[int] = ..., batch_norms: _Optional[_Iterable[str]] = ..., labels: _Optional[_Mapping[int, int]] = ..., samples: _Optional[int] = ...) -> None: ...

class TimedStep(_message.Message):
    __slots__ = ("batch", "seconds", "device_bytes")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    batch: int
    seconds: float
    device_bytes: int
    def __init__(self, batch: _Optional[int] = ..., seconds: _Optional[float] = ..., device_bytes: _Optional[int] = ...) -> None: ...

class Happening(_message.Message):
    __slots__ = ("job", "at", "kind", "text", "data_json")
    JOB_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DATA_JSON_FIELD_NUMBER: _ClassVar[int]
    job: str
    at: float
    kind: str
    text: str
    data_json: str
    def __init__(self, job: _Optional[str] = ..., at: _Optional[float] = ..., kind: _Optional[str] = ..., text: _Optional[str] = ..., data_json: _Optional[str] = ...) -> None: ...

class LogBatch(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[LogRecord]
    def __init__(self, records: _Optional[_Iterable[_Union[LogRecord, _Mapping]]] = ...) -> None: ...

class LogRecord(_message.Message):
    __slots__ = ("job", "at", "source", "text")
    JOB_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    job: str
    at: float
    source: str
    text: str
    def __init__(self, job: _Optional[str] = ..., at: _Optional[float] = ..., source: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("csr_pem",)
    CSR_PEM_FIELD_NUMBER: _ClassVar[int]
    csr_pem: bytes
    def __init__(self, csr_pem: _Optional[bytes] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("certificate_pem", "ca_pem")
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    CA_PEM_FIELD_NUMBER: _ClassVar[int]
    certificate_pem: bytes
    ca_pem: bytes
    def __init__(self, certificate_pem: _Optional[bytes] = ..., ca_pem: _Optional[bytes] = ...) -> None: ...
