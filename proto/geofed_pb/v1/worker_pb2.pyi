from geofed_pb.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachRequest(_message.Message):
    __slots__ = ("layout_json", "initial_key", "base_key")
    LAYOUT_JSON_FIELD_NUMBER: _ClassVar[int]
    INITIAL_KEY_FIELD_NUMBER: _ClassVar[int]
    BASE_KEY_FIELD_NUMBER: _ClassVar[int]
    layout_json: str
    initial_key: str
    base_key: str
    def __init__(self, layout_json: _Optional[str] = ..., initial_key: _Optional[str] = ..., base_key: _Optional[str] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("round", "step", "model_key", "state_key", "boundary", "finished", "evaluate", "pending", "until_step", "correction_key", "background", "base_key")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MODEL_KEY_FIELD_NUMBER: _ClassVar[int]
    STATE_KEY_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    UNTIL_STEP_FIELD_NUMBER: _ClassVar[int]
    CORRECTION_KEY_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_KEY_FIELD_NUMBER: _ClassVar[int]
    round: int
    step: int
    model_key: str
    state_key: str
    boundary: bool
    finished: bool
    evaluate: bool
    pending: bool
    until_step: int
    correction_key: str
    background: bool
    base_key: str
    def __init__(self, round: _Optional[int] = ..., step: _Optional[int] = ..., model_key: _Optional[str] = ..., state_key: _Optional[str] = ..., boundary: bool = ..., finished: bool = ..., evaluate: bool = ..., pending: bool = ..., until_step: _Optional[int] = ..., correction_key: _Optional[str] = ..., background: bool = ..., base_key: _Optional[str] = ...) -> None: ...

class ReduceRequest(_message.Message):
    __slots__ = ("step", "key", "samples", "loss")
    STEP_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    step: int
    key: str
    samples: float
    loss: float
    def __init__(self, step: _Optional[int] = ..., key: _Optional[str] = ..., samples: _Optional[float] = ..., loss: _Optional[float] = ...) -> None: ...

class ReduceReply(_message.Message):
    __slots__ = ("pending", "merged_key", "samples")
    PENDING_FIELD_NUMBER: _ClassVar[int]
    MERGED_KEY_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    pending: bool
    merged_key: str
    samples: float
    def __init__(self, pending: bool = ..., merged_key: _Optional[str] = ..., samples: _Optional[float] = ...) -> None: ...

class SteppedRequest(_message.Message):
    __slots__ = ("step", "loss")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    step: int
    loss: float
    def __init__(self, step: _Optional[int] = ..., loss: _Optional[float] = ...) -> None: ...

class SteppedReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BoundaryRequest(_message.Message):
    __slots__ = ("round", "step", "digest", "model_key", "state_key", "samples", "loss", "compute_seconds", "group", "logged", "usage", "merge_seconds", "evaluate_seconds")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_KEY_FIELD_NUMBER: _ClassVar[int]
    STATE_KEY_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LOGGED_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    MERGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    round: int
    step: int
    digest: str
    model_key: str
    state_key: str
    samples: float
    loss: float
    compute_seconds: float
    group: int
    logged: _containers.RepeatedCompositeFieldContainer[LoggedRound]
    usage: _common_pb2.Usage
    merge_seconds: float
    evaluate_seconds: float
    def __init__(self, round: _Optional[int] = ..., step: _Optional[int] = ..., digest: _Optional[str] = ..., model_key: _Optional[str] = ..., state_key: _Optional[str] = ..., samples: _Optional[float] = ..., loss: _Optional[float] = ..., compute_seconds: _Optional[float] = ..., group: _Optional[int] = ..., logged: _Optional[_Iterable[_Union[LoggedRound, _Mapping]]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., merge_seconds: _Optional[float] = ..., evaluate_seconds: _Optional[float] = ...) -> None: ...

class LoggedRound(_message.Message):
    __slots__ = ("round", "values")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: LoggedSum
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[LoggedSum, _Mapping]] = ...) -> None: ...
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    round: int
    values: _containers.MessageMap[str, LoggedSum]
    def __init__(self, round: _Optional[int] = ..., values: _Optional[_Mapping[str, LoggedSum]] = ...) -> None: ...

class LoggedSum(_message.Message):
    __slots__ = ("sum", "count")
    SUM_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    sum: float
    count: int
    def __init__(self, sum: _Optional[float] = ..., count: _Optional[int] = ...) -> None: ...

class BoundaryReply(_message.Message):
    __slots__ = ("pending", "round", "model_key", "evaluate", "finished", "state_key", "until_step", "correction_key")
    PENDING_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MODEL_KEY_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    STATE_KEY_FIELD_NUMBER: _ClassVar[int]
    UNTIL_STEP_FIELD_NUMBER: _ClassVar[int]
    CORRECTION_KEY_FIELD_NUMBER: _ClassVar[int]
    pending: bool
    round: int
    model_key: str
    evaluate: bool
    finished: bool
    state_key: str
    until_step: int
    correction_key: str
    def __init__(self, pending: bool = ..., round: _Optional[int] = ..., model_key: _Optional[str] = ..., evaluate: bool = ..., finished: bool = ..., state_key: _Optional[str] = ..., until_step: _Optional[int] = ..., correction_key: _Optional[str] = ...) -> None: ...

class EvaluatedRequest(_message.Message):
    __slots__ = ("round", "samples", "metrics", "error", "logged", "histograms")
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
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LOGGED_FIELD_NUMBER: _ClassVar[int]
    HISTOGRAMS_FIELD_NUMBER: _ClassVar[int]
    round: int
    samples: float
    metrics: _containers.ScalarMap[str, float]
    error: str
    logged: _containers.RepeatedCompositeFieldContainer[LoggedRound]
    histograms: _containers.MessageMap[str, _common_pb2.Histogram]
    def __init__(self, round: _Optional[int] = ..., samples: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., error: _Optional[str] = ..., logged: _Optional[_Iterable[_Union[LoggedRound, _Mapping]]] = ..., histograms: _Optional[_Mapping[str, _common_pb2.Histogram]] = ...) -> None: ...

class EvaluatedReply(_message.Message):
    __slots__ = ("pending",)
    PENDING_FIELD_NUMBER: _ClassVar[int]
    pending: bool
    def __init__(self, pending: bool = ...) -> None: ...
