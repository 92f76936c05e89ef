from baton.proto.v1 import common_pb2 as _common_pb2
from baton.proto.v1 import node_pb2 as _node_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineInput(_message.Message):
    __slots__ = ("configure", "get_ledger", "drain", "shutdown", "members")
    CONFIGURE_FIELD_NUMBER: _ClassVar[int]
    GET_LEDGER_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    configure: str
    get_ledger: bool
    drain: bool
    shutdown: bool
    members: Members
    def __init__(self, configure: _Optional[str] = ..., get_ledger: bool = ..., drain: bool = ..., shutdown: bool = ..., members: _Optional[_Union[Members, _Mapping]] = ...) -> None: ...

class Members(_message.Message):
    __slots__ = ("engines", "is_away")
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    IS_AWAY_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[ListedEngine]
    is_away: bool
    def __init__(self, engines: _Optional[_Iterable[_Union[ListedEngine, _Mapping]]] = ..., is_away: bool = ...) -> None: ...

class ListedEngine(_message.Message):
    __slots__ = ("incarnation", "role", "name", "address", "host_id", "model", "fingerprint")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    role: str
    name: str
    address: str
    host_id: bytes
    model: str
    fingerprint: str
    def __init__(self, incarnation: _Optional[str] = ..., role: _Optional[str] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., host_id: _Optional[bytes] = ..., model: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class EngineOutput(_message.Message):
    __slots__ = ("progress", "ready", "failed", "heartbeat", "ledger", "cache_changes")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    CACHE_CHANGES_FIELD_NUMBER: _ClassVar[int]
    progress: str
    ready: Ready
    failed: _common_pb2.Error
    heartbeat: _node_pb2.Heartbeat
    ledger: str
    cache_changes: CacheChanges
    def __init__(self, progress: _Optional[str] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., failed: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., heartbeat: _Optional[_Union[_node_pb2.Heartbeat, _Mapping]] = ..., ledger: _Optional[str] = ..., cache_changes: _Optional[_Union[CacheChanges, _Mapping]] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("welcome", "port", "host_id")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    welcome: _node_pb2.Welcome
    port: int
    host_id: bytes
    def __init__(self, welcome: _Optional[_Union[_node_pb2.Welcome, _Mapping]] = ..., port: _Optional[int] = ..., host_id: _Optional[bytes] = ...) -> None: ...

class CacheChanges(_message.Message):
    __slots__ = ("removed", "stored", "in_host")
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    IN_HOST_FIELD_NUMBER: _ClassVar[int]
    removed: bytes
    stored: bytes
    in_host: bytes
    def __init__(self, removed: _Optional[bytes] = ..., stored: _Optional[bytes] = ..., in_host: _Optional[bytes] = ...) -> None: ...
