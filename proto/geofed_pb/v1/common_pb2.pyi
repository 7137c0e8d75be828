from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlobChunk(_message.Message):
    __slots__ = ("digest", "total_bytes", "offset", "data", "model", "part")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    digest: str
    total_bytes: int
    offset: int
    data: bytes
    model: bool
    part: bool
    def __init__(self, digest: _Optional[str] = ..., total_bytes: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., model: bool = ..., part: bool = ...) -> None: ...

class BlobRequest(_message.Message):
    __slots__ = ("digest", "offset")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    digest: str
    offset: int
    def __init__(self, digest: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class BlobsRequest(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, digests: _Optional[_Iterable[str]] = ...) -> None: ...

class BlobsReply(_message.Message):
    __slots__ = ("incomplete",)
    INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    incomplete: _containers.RepeatedCompositeFieldContainer[BlobAck]
    def __init__(self, incomplete: _Optional[_Iterable[_Union[BlobAck, _Mapping]]] = ...) -> None: ...

class BlobAck(_message.Message):
    __slots__ = ("digest", "have_bytes", "complete")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    HAVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    digest: str
    have_bytes: int
    complete: bool
    def __init__(self, digest: _Optional[str] = ..., have_bytes: _Optional[int] = ..., complete: bool = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "hint", "retryable")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    hint: str
    retryable: bool
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., hint: _Optional[str] = ..., retryable: bool = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("cpu_cores", "memory_bytes", "gpu_memory_bytes")
    CPU_CORES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    cpu_cores: float
    memory_bytes: int
    gpu_memory_bytes: int
    def __init__(self, cpu_cores: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., gpu_memory_bytes: _Optional[int] = ...) -> None: ...

class RoundTime(_message.Message):
    __slots__ = ("compute", "merge", "exchange", "wait", "evaluate")
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    MERGE_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    compute: float
    merge: float
    exchange: float
    wait: float
    evaluate: float
    def __init__(self, compute: _Optional[float] = ..., merge: _Optional[float] = ..., exchange: _Optional[float] = ..., wait: _Optional[float] = ..., evaluate: _Optional[float] = ...) -> None: ...

class Logged(_message.Message):
    __slots__ = ("round", "values")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    round: int
    values: _containers.ScalarMap[str, float]
    def __init__(self, round: _Optional[int] = ..., values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("edges", "categories", "counts", "withheld")
    EDGES_FIELD_NUMBER: _ClassVar[int]
    CATEGORIES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_FIELD_NUMBER: _ClassVar[int]
    edges: _containers.RepeatedScalarFieldContainer[float]
    categories: _containers.RepeatedScalarFieldContainer[str]
    counts: _containers.RepeatedScalarFieldContainer[int]
    withheld: int
    def __init__(self, edges: _Optional[_Iterable[float]] = ..., categories: _Optional[_Iterable[str]] = ..., counts: _Optional[_Iterable[int]] = ..., withheld: _Optional[int] = ...) -> None: ...

class Money(_message.Message):
    __slots__ = ("item", "quantity", "unit", "usd", "source")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    QUANTITY_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    USD_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    item: str
    quantity: float
    unit: str
    usd: float
    source: str
    def __init__(self, item: _Optional[str] = ..., quantity: _Optional[float] = ..., unit: _Optional[str] = ..., usd: _Optional[float] = ..., source: _Optional[str] = ...) -> None: ...

class Submission(_message.Message):
    __slots__ = ("user", "public_key", "signature", "spec_digest", "initial_model", "initial_adapter")
    USER_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    SPEC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    INITIAL_MODEL_FIELD_NUMBER: _ClassVar[int]
    INITIAL_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    user: str
    public_key: str
    signature: bytes
    spec_digest: str
    initial_model: str
    initial_adapter: str
    def __init__(self, user: _Optional[str] = ..., public_key: _Optional[str] = ..., signature: _Optional[bytes] = ..., spec_digest: _Optional[str] = ..., initial_model: _Optional[str] = ..., initial_adapter: _Optional[str] = ...) -> None: ...
