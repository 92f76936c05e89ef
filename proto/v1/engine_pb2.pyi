from baton.proto.v1 import common_pb2 as _common_pb2
from baton.proto.v1 import handoff_pb2 as _handoff_pb2
from baton.proto.v1 import node_pb2 as _node_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineInput(_message.Message):
    __slots__ = ("configure", "from_gateway", "gateway_lost", "from_peer", "peer_linked", "peer_lost", "get_ledger", "drain", "shutdown", "gateway_linked")
    CONFIGURE_FIELD_NUMBER: _ClassVar[int]
    FROM_GATEWAY_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_LOST_FIELD_NUMBER: _ClassVar[int]
    FROM_PEER_FIELD_NUMBER: _ClassVar[int]
    PEER_LINKED_FIELD_NUMBER: _ClassVar[int]
    PEER_LOST_FIELD_NUMBER: _ClassVar[int]
    GET_LEDGER_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_LINKED_FIELD_NUMBER: _ClassVar[int]
    configure: str
    from_gateway: FromGateway
    gateway_lost: str
    from_peer: FromPeer
    peer_linked: PeerLinked
    peer_lost: str
    get_ledger: int
    drain: bool
    shutdown: bool
    gateway_linked: GatewayLinked
    def __init__(self, configure: _Optional[str] = ..., from_gateway: _Optional[_Union[FromGateway, _Mapping]] = ..., gateway_lost: _Optional[str] = ..., from_peer: _Optional[_Union[FromPeer, _Mapping]] = ..., peer_linked: _Optional[_Union[PeerLinked, _Mapping]] = ..., peer_lost: _Optional[str] = ..., get_ledger: _Optional[int] = ..., drain: bool = ..., shutdown: bool = ..., gateway_linked: _Optional[_Union[GatewayLinked, _Mapping]] = ...) -> None: ...

class GatewayLinked(_message.Message):
    __slots__ = ("gateway", "token")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    token: bytes
    def __init__(self, gateway: _Optional[str] = ..., token: _Optional[bytes] = ...) -> None: ...

class FromGateway(_message.Message):
    __slots__ = ("gateway", "message")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    message: _node_pb2.GatewayMessage
    def __init__(self, gateway: _Optional[str] = ..., message: _Optional[_Union[_node_pb2.GatewayMessage, _Mapping]] = ...) -> None: ...

class FromPeer(_message.Message):
    __slots__ = ("incarnation", "message")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    message: _handoff_pb2.PeerMessage
    def __init__(self, incarnation: _Optional[str] = ..., message: _Optional[_Union[_handoff_pb2.PeerMessage, _Mapping]] = ...) -> None: ...

class PeerLinked(_message.Message):
    __slots__ = ("incarnation", "peer_is_source", "host")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PEER_IS_SOURCE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    peer_is_source: bool
    host: str
    def __init__(self, incarnation: _Optional[str] = ..., peer_is_source: bool = ..., host: _Optional[str] = ...) -> None: ...

class EngineOutput(_message.Message):
    __slots__ = ("progress", "ready", "failed", "to_gateway", "to_peer", "heartbeat", "ledger", "close_peer", "cache_changes", "close_gateway")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    TO_GATEWAY_FIELD_NUMBER: _ClassVar[int]
    TO_PEER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    CLOSE_PEER_FIELD_NUMBER: _ClassVar[int]
    CACHE_CHANGES_FIELD_NUMBER: _ClassVar[int]
    CLOSE_GATEWAY_FIELD_NUMBER: _ClassVar[int]
    progress: str
    ready: _node_pb2.Welcome
    failed: _common_pb2.Error
    to_gateway: ToGateway
    to_peer: ToPeer
    heartbeat: _node_pb2.Heartbeat
    ledger: Ledger
    close_peer: ClosePeer
    cache_changes: CacheChanges
    close_gateway: CloseGateway
    def __init__(self, progress: _Optional[str] = ..., ready: _Optional[_Union[_node_pb2.Welcome, _Mapping]] = ..., failed: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., to_gateway: _Optional[_Union[ToGateway, _Mapping]] = ..., to_peer: _Optional[_Union[ToPeer, _Mapping]] = ..., heartbeat: _Optional[_Union[_node_pb2.Heartbeat, _Mapping]] = ..., ledger: _Optional[_Union[Ledger, _Mapping]] = ..., close_peer: _Optional[_Union[ClosePeer, _Mapping]] = ..., cache_changes: _Optional[_Union[CacheChanges, _Mapping]] = ..., close_gateway: _Optional[_Union[CloseGateway, _Mapping]] = ...) -> None: ...

class ToGateway(_message.Message):
    __slots__ = ("gateway", "message")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    message: _node_pb2.NodeMessage
    def __init__(self, gateway: _Optional[str] = ..., message: _Optional[_Union[_node_pb2.NodeMessage, _Mapping]] = ...) -> None: ...

class ToPeer(_message.Message):
    __slots__ = ("incarnation", "message")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    message: _handoff_pb2.PeerMessage
    def __init__(self, incarnation: _Optional[str] = ..., message: _Optional[_Union[_handoff_pb2.PeerMessage, _Mapping]] = ...) -> None: ...

class CloseGateway(_message.Message):
    __slots__ = ("gateway", "error")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    error: _common_pb2.Error
    def __init__(self, gateway: _Optional[str] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class ClosePeer(_message.Message):
    __slots__ = ("incarnation", "error")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    error: _common_pb2.Error
    def __init__(self, incarnation: _Optional[str] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class CacheChanges(_message.Message):
    __slots__ = ("removed", "stored")
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    removed: bytes
    stored: bytes
    def __init__(self, removed: _Optional[bytes] = ..., stored: _Optional[bytes] = ...) -> None: ...

class Ledger(_message.Message):
    __slots__ = ("query", "json")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    query: int
    json: str
    def __init__(self, query: _Optional[int] = ..., json: _Optional[str] = ...) -> None: ...
