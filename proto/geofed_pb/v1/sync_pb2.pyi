from geofed_pb.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MaskKeys(_message.Message):
    __slots__ = ("job", "keys")
    JOB_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    job: str
    keys: _containers.RepeatedCompositeFieldContainer[MaskKey]
    def __init__(self, job: _Optional[str] = ..., keys: _Optional[_Iterable[_Union[MaskKey, _Mapping]]] = ...) -> None: ...

class MaskKey(_message.Message):
    __slots__ = ("region", "key", "terms", "signature", "certificate_pem")
    REGION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    region: str
    key: bytes
    terms: str
    signature: bytes
    certificate_pem: bytes
    def __init__(self, region: _Optional[str] = ..., key: _Optional[bytes] = ..., terms: _Optional[str] = ..., signature: _Optional[bytes] = ..., certificate_pem: _Optional[bytes] = ...) -> None: ...

class RejoinRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class RejoinReply(_message.Message):
    __slots__ = ("merges", "layout_json", "kept", "state_lost")
    MERGES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_JSON_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    STATE_LOST_FIELD_NUMBER: _ClassVar[int]
    merges: int
    layout_json: str
    kept: _containers.RepeatedCompositeFieldContainer[UpdateManifest]
    state_lost: bool
    def __init__(self, merges: _Optional[int] = ..., layout_json: _Optional[str] = ..., kept: _Optional[_Iterable[_Union[UpdateManifest, _Mapping]]] = ..., state_lost: bool = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("job", "checkpoint", "region", "sequence")
    JOB_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    job: str
    checkpoint: bool
    region: str
    sequence: int
    def __init__(self, job: _Optional[str] = ..., checkpoint: bool = ..., region: _Optional[str] = ..., sequence: _Optional[int] = ...) -> None: ...

class UpdateManifest(_message.Message):
    __slots__ = ("job", "region", "epoch", "sequence", "digest", "total_bytes", "weight", "seen", "last", "stretch", "settled", "ends", "first", "takes_sums", "round_seconds", "signature", "certificate_pem", "merged")
    class SeenEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    STRETCH_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    TAKES_SUMS_FIELD_NUMBER: _ClassVar[int]
    ROUND_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    job: str
    region: str
    epoch: int
    sequence: int
    digest: str
    total_bytes: int
    weight: float
    seen: _containers.ScalarMap[str, int]
    last: bool
    stretch: int
    settled: int
    ends: int
    first: int
    takes_sums: bool
    round_seconds: float
    signature: bytes
    certificate_pem: bytes
    merged: _containers.RepeatedCompositeFieldContainer[UpdateManifest]
    def __init__(self, job: _Optional[str] = ..., region: _Optional[str] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., digest: _Optional[str] = ..., total_bytes: _Optional[int] = ..., weight: _Optional[float] = ..., seen: _Optional[_Mapping[str, int]] = ..., last: bool = ..., stretch: _Optional[int] = ..., settled: _Optional[int] = ..., ends: _Optional[int] = ..., first: _Optional[int] = ..., takes_sums: bool = ..., round_seconds: _Optional[float] = ..., signature: _Optional[bytes] = ..., certificate_pem: _Optional[bytes] = ..., merged: _Optional[_Iterable[_Union[UpdateManifest, _Mapping]]] = ...) -> None: ...

class OfferReply(_message.Message):
    __slots__ = ("verdict", "have_bytes", "have", "bulk_port", "ticket", "next", "unchecked")
    class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        VERDICT_UNSPECIFIED: _ClassVar[OfferReply.Verdict]
        VERDICT_WANT: _ClassVar[OfferReply.Verdict]
        VERDICT_HAVE: _ClassVar[OfferReply.Verdict]
        VERDICT_FENCED: _ClassVar[OfferReply.Verdict]
        VERDICT_UNKNOWN: _ClassVar[OfferReply.Verdict]
    VERDICT_UNSPECIFIED: OfferReply.Verdict
    VERDICT_WANT: OfferReply.Verdict
    VERDICT_HAVE: OfferReply.Verdict
    VERDICT_FENCED: OfferReply.Verdict
    VERDICT_UNKNOWN: OfferReply.Verdict
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    HAVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    BULK_PORT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    UNCHECKED_FIELD_NUMBER: _ClassVar[int]
    verdict: OfferReply.Verdict
    have_bytes: int
    have: _containers.RepeatedCompositeFieldContainer[Range]
    bulk_port: int
    ticket: bytes
    next: int
    unchecked: bool
    def __init__(self, verdict: _Optional[_Union[OfferReply.Verdict, str]] = ..., have_bytes: _Optional[int] = ..., have: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., bulk_port: _Optional[int] = ..., ticket: _Optional[bytes] = ..., next: _Optional[int] = ..., unchecked: bool = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("begin", "end")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class CollectRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class CollectCall(_message.Message):
    __slots__ = ("bulk_port", "streams")
    BULK_PORT_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    bulk_port: int
    streams: int
    def __init__(self, bulk_port: _Optional[int] = ..., streams: _Optional[int] = ...) -> None: ...

class BulkHello(_message.Message):
    __slots__ = ("job", "collects", "ticket")
    JOB_FIELD_NUMBER: _ClassVar[int]
    COLLECTS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    job: str
    collects: bool
    ticket: bytes
    def __init__(self, job: _Optional[str] = ..., collects: bool = ..., ticket: _Optional[bytes] = ...) -> None: ...

class BulkOffer(_message.Message):
    __slots__ = ("manifest", "ticket")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    manifest: UpdateManifest
    ticket: bytes
    def __init__(self, manifest: _Optional[_Union[UpdateManifest, _Mapping]] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class UpdateChunk(_message.Message):
    __slots__ = ("manifest", "offset", "data")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    manifest: UpdateManifest
    offset: int
    data: bytes
    def __init__(self, manifest: _Optional[_Union[UpdateManifest, _Mapping]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class IntroduceRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class Introduction(_message.Message):
    __slots__ = ("region", "cloud", "list_digest", "have_through")
    REGION_FIELD_NUMBER: _ClassVar[int]
    CLOUD_FIELD_NUMBER: _ClassVar[int]
    LIST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    HAVE_THROUGH_FIELD_NUMBER: _ClassVar[int]
    region: str
    cloud: str
    list_digest: str
    have_through: int
    def __init__(self, region: _Optional[str] = ..., cloud: _Optional[str] = ..., list_digest: _Optional[str] = ..., have_through: _Optional[int] = ...) -> None: ...

class PsConfig(_message.Message):
    __slots__ = ("epoch", "attempt", "peers", "stop", "neighbours", "routes", "former", "finish", "halt")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    NEIGHBOURS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    FORMER_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    HALT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    attempt: int
    peers: _containers.RepeatedCompositeFieldContainer[PsPeer]
    stop: bool
    neighbours: _containers.RepeatedCompositeFieldContainer[Neighbours]
    routes: int
    former: _containers.RepeatedCompositeFieldContainer[Neighbours]
    finish: bool
    halt: bool
    def __init__(self, epoch: _Optional[int] = ..., attempt: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[PsPeer, _Mapping]]] = ..., stop: bool = ..., neighbours: _Optional[_Iterable[_Union[Neighbours, _Mapping]]] = ..., routes: _Optional[int] = ..., former: _Optional[_Iterable[_Union[Neighbours, _Mapping]]] = ..., finish: bool = ..., halt: bool = ...) -> None: ...

class Neighbours(_message.Message):
    __slots__ = ("a", "b")
    A_FIELD_NUMBER: _ClassVar[int]
    B_FIELD_NUMBER: _ClassVar[int]
    a: str
    b: str
    def __init__(self, a: _Optional[str] = ..., b: _Optional[str] = ...) -> None: ...

class PsPeer(_message.Message):
    __slots__ = ("region", "address", "epoch", "unsigned")
    REGION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UNSIGNED_FIELD_NUMBER: _ClassVar[int]
    region: str
    address: str
    epoch: int
    unsigned: bool
    def __init__(self, region: _Optional[str] = ..., address: _Optional[str] = ..., epoch: _Optional[int] = ..., unsigned: bool = ...) -> None: ...

class PsWatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PsModelRequest(_message.Message):
    __slots__ = ("round",)
    ROUND_FIELD_NUMBER: _ClassVar[int]
    round: int
    def __init__(self, round: _Optional[int] = ...) -> None: ...

class PsStatus(_message.Message):
    __slots__ = ("phase", "condition", "epoch", "attempt", "round", "step", "samples", "loss", "metrics", "metrics_samples", "metrics_round", "sent_bytes", "received_bytes", "model_digest", "applied_updates", "error", "wait_seconds", "link_rtt_ms", "link_mbps", "samples_per_second", "links_down", "staleness", "refused", "interval", "codec", "link_streams", "decisions", "channel", "routes", "update_bytes", "metrics_error", "round_loss", "peer_faults", "refusal_reasons", "logged", "usage", "time", "histograms", "suspicion")
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
    class ReceivedBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class LinkRttMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class LinkMbpsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
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
    class LinkStreamsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ChannelEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RefusalReasonsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class HistogramsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _common_pb2.Histogram
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_common_pb2.Histogram, _Mapping]] = ...) -> None: ...
    class SuspicionEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    METRICS_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    METRICS_ROUND_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    APPLIED_UPDATES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LINK_RTT_MS_FIELD_NUMBER: _ClassVar[int]
    LINK_MBPS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LINKS_DOWN_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    LINK_STREAMS_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    UPDATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    METRICS_ERROR_FIELD_NUMBER: _ClassVar[int]
    ROUND_LOSS_FIELD_NUMBER: _ClassVar[int]
    PEER_FAULTS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_REASONS_FIELD_NUMBER: _ClassVar[int]
    LOGGED_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    HISTOGRAMS_FIELD_NUMBER: _ClassVar[int]
    SUSPICION_FIELD_NUMBER: _ClassVar[int]
    phase: str
    condition: str
    epoch: int
    attempt: int
    round: int
    step: int
    samples: int
    loss: float
    metrics: _containers.ScalarMap[str, float]
    metrics_samples: int
    metrics_round: int
    sent_bytes: _containers.ScalarMap[str, int]
    received_bytes: _containers.ScalarMap[str, int]
    model_digest: str
    applied_updates: int
    error: _common_pb2.Error
    wait_seconds: float
    link_rtt_ms: _containers.ScalarMap[str, float]
    link_mbps: _containers.ScalarMap[str, float]
    samples_per_second: float
    links_down: _containers.RepeatedScalarFieldContainer[str]
    staleness: _containers.ScalarMap[str, float]
    refused: _containers.ScalarMap[str, int]
    interval: int
    codec: str
    link_streams: _containers.ScalarMap[str, int]
    decisions: _containers.RepeatedScalarFieldContainer[str]
    channel: _containers.ScalarMap[str, int]
    routes: int
    update_bytes: int
    metrics_error: str
    round_loss: float
    peer_faults: _containers.RepeatedCompositeFieldContainer[PeerFault]
    refusal_reasons: _containers.ScalarMap[str, str]
    logged: _common_pb2.Logged
    usage: _common_pb2.Usage
    time: _common_pb2.RoundTime
    histograms: _containers.MessageMap[str, _common_pb2.Histogram]
    suspicion: _containers.ScalarMap[str, int]
    def __init__(self, phase: _Optional[str] = ..., condition: _Optional[str] = ..., epoch: _Optional[int] = ..., attempt: _Optional[int] = ..., round: _Optional[int] = ..., step: _Optional[int] = ..., samples: _Optional[int] = ..., loss: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., metrics_samples: _Optional[int] = ..., metrics_round: _Optional[int] = ..., sent_bytes: _Optional[_Mapping[str, int]] = ..., received_bytes: _Optional[_Mapping[str, int]] = ..., model_digest: _Optional[str] = ..., applied_updates: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., wait_seconds: _Optional[float] = ..., link_rtt_ms: _Optional[_Mapping[str, float]] = ..., link_mbps: _Optional[_Mapping[str, float]] = ..., samples_per_second: _Optional[float] = ..., links_down: _Optional[_Iterable[str]] = ..., staleness: _Optional[_Mapping[str, float]] = ..., refused: _Optional[_Mapping[str, int]] = ..., interval: _Optional[int] = ..., codec: _Optional[str] = ..., link_streams: _Optional[_Mapping[str, int]] = ..., decisions: _Optional[_Iterable[str]] = ..., channel: _Optional[_Mapping[str, int]] = ..., routes: _Optional[int] = ..., update_bytes: _Optional[int] = ..., metrics_error: _Optional[str] = ..., round_loss: _Optional[float] = ..., peer_faults: _Optional[_Iterable[_Union[PeerFault, _Mapping]]] = ..., refusal_reasons: _Optional[_Mapping[str, str]] = ..., logged: _Optional[_Union[_common_pb2.Logged, _Mapping]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., time: _Optional[_Union[_common_pb2.RoundTime, _Mapping]] = ..., histograms: _Optional[_Mapping[str, _common_pb2.Histogram]] = ..., suspicion: _Optional[_Mapping[str, int]] = ...) -> None: ...

class PeerFault(_message.Message):
    __slots__ = ("region", "code", "text", "count")
    REGION_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    region: str
    code: str
    text: str
    count: int
    def __init__(self, region: _Optional[str] = ..., code: _Optional[str] = ..., text: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...
