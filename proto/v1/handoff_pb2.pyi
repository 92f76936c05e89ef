from baton.proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerMessage(_message.Message):
    __slots__ = ("hello", "attach", "renew", "release", "cancel", "manifest", "revoked", "refused")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    attach: Attach
    renew: Renew
    release: Release
    cancel: CancelTransfer
    manifest: Manifest
    revoked: Revoked
    refused: _common_pb2.Error
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., cancel: _Optional[_Union[CancelTransfer, _Mapping]] = ..., manifest: _Optional[_Union[Manifest, _Mapping]] = ..., revoked: _Optional[_Union[Revoked, _Mapping]] = ..., refused: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("incarnation", "protocol", "fingerprint", "access")
    class FingerprintEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    protocol: int
    fingerprint: _containers.ScalarMap[str, str]
    access: PoolAccess
    def __init__(self, incarnation: _Optional[str] = ..., protocol: _Optional[int] = ..., fingerprint: _Optional[_Mapping[str, str]] = ..., access: _Optional[_Union[PoolAccess, _Mapping]] = ...) -> None: ...

class PoolAccess(_message.Message):
    __slots__ = ("host_id", "port", "key")
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    host_id: bytes
    port: int
    key: bytes
    def __init__(self, host_id: _Optional[bytes] = ..., port: _Optional[int] = ..., key: _Optional[bytes] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("transfer_id", "sees_steps", "block_hashes")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    SEES_STEPS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    sees_steps: bool
    block_hashes: bytes
    def __init__(self, transfer_id: _Optional[str] = ..., sees_steps: bool = ..., block_hashes: _Optional[bytes] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ("transfer_ids",)
    TRANSFER_IDS_FIELD_NUMBER: _ClassVar[int]
    transfer_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, transfer_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("transfer_id",)
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    def __init__(self, transfer_id: _Optional[str] = ...) -> None: ...

class CancelTransfer(_message.Message):
    __slots__ = ("transfer_id",)
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    def __init__(self, transfer_id: _Optional[str] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("transfer_id", "seq", "num_tokens", "lease_remaining_us", "state", "first_index", "block_ids", "generations", "hashes", "step")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEASE_REMAINING_US_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    seq: int
    num_tokens: int
    lease_remaining_us: int
    state: HandoffState
    first_index: int
    block_ids: bytes
    generations: bytes
    hashes: bytes
    step: int
    def __init__(self, transfer_id: _Optional[str] = ..., seq: _Optional[int] = ..., num_tokens: _Optional[int] = ..., lease_remaining_us: _Optional[int] = ..., state: _Optional[_Union[HandoffState, _Mapping]] = ..., first_index: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., step: _Optional[int] = ...) -> None: ...

class HandoffState(_message.Message):
    __slots__ = ("num_blocks", "first_token_id", "fork_token_ids", "candidates")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FORK_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    first_token_id: int
    fork_token_ids: _containers.RepeatedScalarFieldContainer[int]
    candidates: Candidates
    def __init__(self, num_blocks: _Optional[int] = ..., first_token_id: _Optional[int] = ..., fork_token_ids: _Optional[_Iterable[int]] = ..., candidates: _Optional[_Union[Candidates, _Mapping]] = ...) -> None: ...

class Candidates(_message.Message):
    __slots__ = ("token_ids", "scores", "logprobs", "top_ids", "top_logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., scores: _Optional[_Iterable[float]] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Revoked(_message.Message):
    __slots__ = ("transfer_id", "error")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    error: _common_pb2.Error
    def __init__(self, transfer_id: _Optional[str] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...
