from baton.proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GatewayMessage(_message.Message):
    __slots__ = ("dispatch", "cancel", "set_promise", "load_adapter")
    DISPATCH_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    SET_PROMISE_FIELD_NUMBER: _ClassVar[int]
    LOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    dispatch: Dispatch
    cancel: Cancel
    set_promise: SetPromise
    load_adapter: LoadAdapter
    def __init__(self, dispatch: _Optional[_Union[Dispatch, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., set_promise: _Optional[_Union[SetPromise, _Mapping]] = ..., load_adapter: _Optional[_Union[LoadAdapter, _Mapping]] = ...) -> None: ...

class Dispatch(_message.Message):
    __slots__ = ("request_id", "attempt", "prompt_token_ids", "output_token_ids", "sampling", "cache_salt", "ticket", "deadline_remaining_us", "sample_index", "fork_request_ids", "caller_id", "may_refuse", "prefix_source", "adapter", "is_on_trial")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_REMAINING_US_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    FORK_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    CALLER_ID_FIELD_NUMBER: _ClassVar[int]
    MAY_REFUSE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SOURCE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    IS_ON_TRIAL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prompt_token_ids: bytes
    output_token_ids: bytes
    sampling: _common_pb2.SamplingParams
    cache_salt: str
    ticket: Ticket
    deadline_remaining_us: int
    sample_index: int
    fork_request_ids: _containers.RepeatedScalarFieldContainer[str]
    caller_id: int
    may_refuse: bool
    prefix_source: PrefixSource
    adapter: Adapter
    is_on_trial: bool
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_token_ids: _Optional[bytes] = ..., output_token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ..., deadline_remaining_us: _Optional[int] = ..., sample_index: _Optional[int] = ..., fork_request_ids: _Optional[_Iterable[str]] = ..., caller_id: _Optional[int] = ..., may_refuse: bool = ..., prefix_source: _Optional[_Union[PrefixSource, _Mapping]] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ..., is_on_trial: bool = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "digest", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    path: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadAdapter(_message.Message):
    __slots__ = ("order_id", "name", "path")
    ORDER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    order_id: int
    name: str
    path: str
    def __init__(self, order_id: _Optional[int] = ..., name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class AdapterLoaded(_message.Message):
    __slots__ = ("order_id", "digest", "error")
    ORDER_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    order_id: int
    digest: str
    error: _common_pb2.Error
    def __init__(self, order_id: _Optional[int] = ..., digest: _Optional[str] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class PrefixSource(_message.Message):
    __slots__ = ("incarnation", "num_blocks", "limit_us")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_US_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    num_blocks: int
    limit_us: int
    def __init__(self, incarnation: _Optional[str] = ..., num_blocks: _Optional[int] = ..., limit_us: _Optional[int] = ...) -> None: ...

class SetPromise(_message.Message):
    __slots__ = ("epoch", "leader", "tbt_target_s")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    TBT_TARGET_S_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    leader: str
    tbt_target_s: float
    def __init__(self, epoch: _Optional[int] = ..., leader: _Optional[str] = ..., tbt_target_s: _Optional[float] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("transfer_id", "source_incarnation", "puller_incarnation")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PULLER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    source_incarnation: str
    puller_incarnation: str
    def __init__(self, transfer_id: _Optional[str] = ..., source_incarnation: _Optional[str] = ..., puller_incarnation: _Optional[str] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class NodeMessage(_message.Message):
    __slots__ = ("welcome", "outputs", "heartbeat", "engine_ended", "refused", "adapter_loaded")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ENDED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOADED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    outputs: StepOutputs
    heartbeat: Heartbeat
    engine_ended: _common_pb2.Error
    refused: _common_pb2.Error
    adapter_loaded: AdapterLoaded
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., outputs: _Optional[_Union[StepOutputs, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., engine_ended: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., refused: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., adapter_loaded: _Optional[_Union[AdapterLoaded, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("incarnation", "role", "name", "model", "fingerprint", "max_model_len", "block_size", "num_blocks", "vocab_size", "eos_token_ids", "can_constrain", "max_num_seqs", "tbt_target_s", "block_bytes", "num_host_blocks", "max_loras")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CAN_CONSTRAIN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    TBT_TARGET_S_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    role: str
    name: str
    model: str
    fingerprint: str
    max_model_len: int
    block_size: int
    num_blocks: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    can_constrain: bool
    max_num_seqs: int
    tbt_target_s: float
    block_bytes: int
    num_host_blocks: int
    max_loras: int
    def __init__(self, incarnation: _Optional[str] = ..., role: _Optional[str] = ..., name: _Optional[str] = ..., model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., max_model_len: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., can_constrain: bool = ..., max_num_seqs: _Optional[int] = ..., tbt_target_s: _Optional[float] = ..., block_bytes: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., max_loras: _Optional[int] = ...) -> None: ...

class StepOutputs(_message.Message):
    __slots__ = ("outputs", "tokens")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[RequestOutput]
    tokens: PlainTokens
    def __init__(self, outputs: _Optional[_Iterable[_Union[RequestOutput, _Mapping]]] = ..., tokens: _Optional[_Union[PlainTokens, _Mapping]] = ...) -> None: ...

class PlainTokens(_message.Message):
    __slots__ = ("request_ids", "attempts", "indices", "token_ids")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., attempts: _Optional[_Iterable[int]] = ..., indices: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RequestOutput(_message.Message):
    __slots__ = ("request_id", "attempt", "first_index", "token_ids", "finish_reason", "error", "events", "cached_tokens", "transfer", "logprobs", "first_prompt_index", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _common_pb2.FinishReason
    error: _common_pb2.Error
    events: _containers.RepeatedCompositeFieldContainer[NodeEvent]
    cached_tokens: int
    transfer: TransferInfo
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    first_prompt_index: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., events: _Optional[_Iterable[_Union[NodeEvent, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., transfer: _Optional[_Union[TransferInfo, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., first_prompt_index: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class NodeEvent(_message.Message):
    __slots__ = ("event", "monotonic_ns")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    MONOTONIC_NS_FIELD_NUMBER: _ClassVar[int]
    event: str
    monotonic_ns: int
    def __init__(self, event: _Optional[str] = ..., monotonic_ns: _Optional[int] = ...) -> None: ...

class TransferInfo(_message.Message):
    __slots__ = ("bytes", "cached_tokens", "transport")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    cached_tokens: int
    transport: str
    def __init__(self, bytes: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., transport: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("num_steps", "num_running", "num_waiting", "free_blocks", "num_blocks", "credit_blocks", "waiting_tokens", "is_draining", "links", "held_blocks", "counters", "num_requests", "room_blocks", "step_cost", "waiting_by_caller", "output_tokens", "num_decodes", "decode_keys", "tbt_target_s", "step_tokens", "is_promise_withdrawn", "promise_epoch", "decode_step_p99_s", "expert_ranks", "promise_leader", "host_blocks", "host_block_s", "adapters", "running_adapters", "waiting_adapters", "disk_blocks", "num_stages", "waiting_pairs", "mean_output_tokens")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ROOM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEP_COST_FIELD_NUMBER: _ClassVar[int]
    WAITING_BY_CALLER_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODES_FIELD_NUMBER: _ClassVar[int]
    DECODE_KEYS_FIELD_NUMBER: _ClassVar[int]
    TBT_TARGET_S_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_PROMISE_WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    PROMISE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_P99_S_FIELD_NUMBER: _ClassVar[int]
    EXPERT_RANKS_FIELD_NUMBER: _ClassVar[int]
    PROMISE_LEADER_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCK_S_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    WAITING_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    WAITING_PAIRS_FIELD_NUMBER: _ClassVar[int]
    MEAN_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    num_running: int
    num_waiting: int
    free_blocks: int
    num_blocks: int
    credit_blocks: int
    waiting_tokens: int
    is_draining: bool
    links: _containers.RepeatedCompositeFieldContainer[PeerLink]
    held_blocks: int
    counters: Counters
    num_requests: int
    room_blocks: int
    step_cost: StepCost
    waiting_by_caller: _containers.RepeatedCompositeFieldContainer[CallerTokens]
    output_tokens: int
    num_decodes: int
    decode_keys: int
    tbt_target_s: float
    step_tokens: int
    is_promise_withdrawn: bool
    promise_epoch: int
    decode_step_p99_s: float
    expert_ranks: int
    promise_leader: str
    host_blocks: int
    host_block_s: float
    adapters: _containers.RepeatedScalarFieldContainer[str]
    running_adapters: _containers.RepeatedScalarFieldContainer[str]
    waiting_adapters: _containers.RepeatedScalarFieldContainer[str]
    disk_blocks: int
    num_stages: int
    waiting_pairs: int
    mean_output_tokens: int
    def __init__(self, num_steps: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., free_blocks: _Optional[int] = ..., num_blocks: _Optional[int] = ..., credit_blocks: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., is_draining: bool = ..., links: _Optional[_Iterable[_Union[PeerLink, _Mapping]]] = ..., held_blocks: _Optional[int] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., num_requests: _Optional[int] = ..., room_blocks: _Optional[int] = ..., step_cost: _Optional[_Union[StepCost, _Mapping]] = ..., waiting_by_caller: _Optional[_Iterable[_Union[CallerTokens, _Mapping]]] = ..., output_tokens: _Optional[int] = ..., num_decodes: _Optional[int] = ..., decode_keys: _Optional[int] = ..., tbt_target_s: _Optional[float] = ..., step_tokens: _Optional[int] = ..., is_promise_withdrawn: bool = ..., promise_epoch: _Optional[int] = ..., decode_step_p99_s: _Optional[float] = ..., expert_ranks: _Optional[int] = ..., promise_leader: _Optional[str] = ..., host_blocks: _Optional[int] = ..., host_block_s: _Optional[float] = ..., adapters: _Optional[_Iterable[str]] = ..., running_adapters: _Optional[_Iterable[str]] = ..., waiting_adapters: _Optional[_Iterable[str]] = ..., disk_blocks: _Optional[int] = ..., num_stages: _Optional[int] = ..., waiting_pairs: _Optional[int] = ..., mean_output_tokens: _Optional[int] = ...) -> None: ...

class StepCost(_message.Message):
    __slots__ = ("base_s", "row_s", "pair_s", "key_s", "max_rows", "relative_error", "mixed_s", "mixed_pair_s")
    BASE_S_FIELD_NUMBER: _ClassVar[int]
    ROW_S_FIELD_NUMBER: _ClassVar[int]
    PAIR_S_FIELD_NUMBER: _ClassVar[int]
    KEY_S_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    RELATIVE_ERROR_FIELD_NUMBER: _ClassVar[int]
    MIXED_S_FIELD_NUMBER: _ClassVar[int]
    MIXED_PAIR_S_FIELD_NUMBER: _ClassVar[int]
    base_s: float
    row_s: _containers.RepeatedScalarFieldContainer[float]
    pair_s: float
    key_s: float
    max_rows: int
    relative_error: float
    mixed_s: float
    mixed_pair_s: float
    def __init__(self, base_s: _Optional[float] = ..., row_s: _Optional[_Iterable[float]] = ..., pair_s: _Optional[float] = ..., key_s: _Optional[float] = ..., max_rows: _Optional[int] = ..., relative_error: _Optional[float] = ..., mixed_s: _Optional[float] = ..., mixed_pair_s: _Optional[float] = ...) -> None: ...

class CallerTokens(_message.Message):
    __slots__ = ("caller_id", "num_tokens")
    CALLER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    caller_id: int
    num_tokens: int
    def __init__(self, caller_id: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("num_preemptions", "prefix_query_tokens", "prefix_hit_tokens", "num_transfers", "transfer_bytes", "transfer_s", "failed_transfers", "num_expired_leases", "num_prompts", "num_prompt_tokens", "num_decode_tokens", "num_promised_steps", "num_kept_steps", "num_refusals", "expert_tokens", "num_fetches", "fetched_blocks", "fetched_bytes", "fetch_s", "failed_fetches", "num_swaps", "host_hit_tokens", "host_bytes_out", "host_bytes_in", "num_drafts", "num_draft_tokens", "accepted_drafts", "disk_hit_tokens", "disk_bytes_out", "disk_bytes_in", "disk_failures")
    class FailedTransfersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class FailedFetchesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    FAILED_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPIRED_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMISED_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSALS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FETCHES_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCH_S_FIELD_NUMBER: _ClassVar[int]
    FAILED_FETCHES_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPS_FIELD_NUMBER: _ClassVar[int]
    HOST_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DISK_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    DISK_FAILURES_FIELD_NUMBER: _ClassVar[int]
    num_preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    num_transfers: int
    transfer_bytes: int
    transfer_s: float
    failed_transfers: _containers.ScalarMap[str, int]
    num_expired_leases: int
    num_prompts: int
    num_prompt_tokens: int
    num_decode_tokens: int
    num_promised_steps: int
    num_kept_steps: int
    num_refusals: int
    expert_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_fetches: int
    fetched_blocks: int
    fetched_bytes: int
    fetch_s: float
    failed_fetches: _containers.ScalarMap[str, int]
    num_swaps: int
    host_hit_tokens: int
    host_bytes_out: int
    host_bytes_in: int
    num_drafts: int
    num_draft_tokens: int
    accepted_drafts: _containers.RepeatedScalarFieldContainer[int]
    disk_hit_tokens: int
    disk_bytes_out: int
    disk_bytes_in: int
    disk_failures: int
    def __init__(self, num_preemptions: _Optional[int] = ..., prefix_query_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., num_transfers: _Optional[int] = ..., transfer_bytes: _Optional[int] = ..., transfer_s: _Optional[float] = ..., failed_transfers: _Optional[_Mapping[str, int]] = ..., num_expired_leases: _Optional[int] = ..., num_prompts: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_decode_tokens: _Optional[int] = ..., num_promised_steps: _Optional[int] = ..., num_kept_steps: _Optional[int] = ..., num_refusals: _Optional[int] = ..., expert_tokens: _Optional[_Iterable[int]] = ..., num_fetches: _Optional[int] = ..., fetched_blocks: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., fetch_s: _Optional[float] = ..., failed_fetches: _Optional[_Mapping[str, int]] = ..., num_swaps: _Optional[int] = ..., host_hit_tokens: _Optional[int] = ..., host_bytes_out: _Optional[int] = ..., host_bytes_in: _Optional[int] = ..., num_drafts: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., accepted_drafts: _Optional[_Iterable[int]] = ..., disk_hit_tokens: _Optional[int] = ..., disk_bytes_out: _Optional[int] = ..., disk_bytes_in: _Optional[int] = ..., disk_failures: _Optional[int] = ...) -> None: ...

class PeerLink(_message.Message):
    __slots__ = ("incarnation", "transport", "gbytes_per_s")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    GBYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    transport: str
    gbytes_per_s: float
    def __init__(self, incarnation: _Optional[str] = ..., transport: _Optional[str] = ..., gbytes_per_s: _Optional[float] = ...) -> None: ...

class GetLedgersRequest(_message.Message):
    __slots__ = ("handshake",)
    HANDSHAKE_FIELD_NUMBER: _ClassVar[int]
    handshake: bytes
    def __init__(self, handshake: _Optional[bytes] = ...) -> None: ...

class GetLedgersResponse(_message.Message):
    __slots__ = ("handshake", "ledgers")
    HANDSHAKE_FIELD_NUMBER: _ClassVar[int]
    LEDGERS_FIELD_NUMBER: _ClassVar[int]
    handshake: bytes
    ledgers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, handshake: _Optional[bytes] = ..., ledgers: _Optional[_Iterable[str]] = ...) -> None: ...

class GetMembersRequest(_message.Message):
    __slots__ = ("handshake",)
    HANDSHAKE_FIELD_NUMBER: _ClassVar[int]
    handshake: bytes
    def __init__(self, handshake: _Optional[bytes] = ...) -> None: ...

class GetMembersResponse(_message.Message):
    __slots__ = ("handshake", "entries")
    HANDSHAKE_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    handshake: bytes
    entries: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, handshake: _Optional[bytes] = ..., entries: _Optional[_Iterable[bytes]] = ...) -> None: ...
