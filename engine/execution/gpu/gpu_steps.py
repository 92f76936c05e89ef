"""Executes steps on a GPU and runs ahead of it: only `collect` waits for the device.

    host     schedule, arrays, plan | launch ...............................  collect
    device                          | copies in | fill in | model | sample | tokens out
                                                     ▲                 │
                                    last sampled tokens, by slice ◄────┘  never leave the device

A step of decodes alone is replayed from a CUDA graph of the next larger size. So is the model part
of a step with a short prefill, or with decodes followed by some prompt tokens:

    tokens of such a graph:  | decodes | prompt tokens | a prompt of padding |

All other steps are launched kernel by kernel; they are long enough to hide the launches. With LoRA
adapters there is another kind of graph, for steps of decodes of which some have an adapter; steps
with adapters and prompts are launched kernel by kernel.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ....kernels.attention.attention import MAX_GRAPH_SLICES, AttentionBackend
from ....kernels.results_triton import fill_in, write_results
from ....kernels.sampling.sampling import sample
from ....kernels.sampling.sampling_triton import VocabularyPart, sample_unfiltered
from ....kernels.upload import upload, upload_into
from ...kv.block_pool import PADDING_BLOCK
from ...kv.cuda_step_count import CudaStepCount
from ...lora.rank_adapters import RankAdapters
from ..batch import SequenceSlice, StepBatch
from ..extras import Extras, compute_extras
from ..step_model import StepHead, StepModel
from ..step_sizes import decode_graph_rows
from .cuda_graphs import (
    ProductTimes,
    StepGraph,
    StepGraphs,
    decode_sizes,
    measure_products,
    prefill_sizes,
)
from .gpu_step import GpuStep, device_errors
from .graphed_model import GraphedModel, products_of
from .step_arrays import (
    decode_arrays,
    places_of_samples,
    sampling_arrays,
    special_rows,
    token_arrays,
)

# Limits of graphs for prompts alone: with more tokens, or pairs of token and key, FA3 saves more
# time than its plan costs on the host. Graphs with room for decodes too have no such limits.
_MAX_PROMPT_TOKENS, _MAX_PROMPT_PAIRS = 512, 1 << 20
# More sizes of graphs for prompts alone, for a chat's next message: products of an 8B model take
# 9 % less than for 192 and 256 tokens.
_MESSAGE_SIZES = (160, 208)
_SHARED_SIZES = (160,)  # beside 64 decodes, if the promised decode latency has no room for 192
_FEW_DECODES = 64  # beside prompts: room for more costs 1 % of a step
_PADDING_SLICE = SequenceSlice((0,), 0, block_table=array("i", [PADDING_BLOCK]), sample=None)


class GpuSteps:
    """Steps of `model` over the pool of `attention`, with at most `max_num_seqs` slices.

    Graphs of decodes and prompts have up to `mixed_tokens` prompt tokens, 0 to MAX_GRAPH_TOKENS. A
    decode may have up to `max_drafts` drafts. `sampled`: where these steps find the tokens that
    they await, if other steps sample them.
    """

    runs_ahead = True

    def __init__(
        self,
        model: StepModel,
        attention: AttentionBackend,
        block_size: int,
        max_num_seqs: int,
        mixed_tokens: int = 0,
        max_drafts: int = 0,
        adapters: RankAdapters | None = None,
        sampled: Tensor | None = None,
    ) -> None:
        self.model = model
        self.head: StepHead | None = None
        self._adapters = adapters
        max_rows = decode_graph_rows(max_num_seqs, max_drafts)
        num_places = max_num_seqs * (1 + max_drafts)  # for sampled tokens
        self._attention = attention
        self._block_size = block_size
        self._device = model.device
        self._part = _part_of_rank(model)
        own = torch.zeros(num_places, dtype=torch.int64, device=self._device)
        self.sampled = own if sampled is None else sampled
        self._logprobs = torch.zeros(num_places, dtype=torch.float32, device=self._device)
        self._count: CudaStepCount | None = None
        self._decode_sizes = decode_sizes(max_rows)
        self.mixed_tokens = mixed_tokens
        few = min(_FEW_DECODES, max_rows)
        rooms = {0: _MAX_PROMPT_TOKENS}
        if mixed_tokens:
            rooms |= {room: room + mixed_tokens for room in (few, max_rows)}
        # Sizes of the graphs with prompts, by the decode tokens that they have room for.
        self._prefill_sizes = {
            room: prefill_sizes(most, _SHARED_SIZES if room else _MESSAGE_SIZES)
            for room, most in rooms.items()
        }
        self.prefill_graphs: dict[int, StepGraphs] = {}
        self.make_graphs(ProductTimes({}, {}))
        self._graphed = GraphedModel(model, self.most_graph_tokens)

    def capture_graphs(self) -> None:
        """Capture all graphs, largest first: the smaller ones then fit into its memory."""
        sizes = [size for each in self._prefill_sizes.values() for size in each]
        times = measure_products(
            products_of(self.model),
            [*self._decode_sizes, *sizes],
            torch.empty(0, dtype=self.model.dtype, device=self._device),
            self._share,
        )
        self.make_graphs(times)
        self._capture_decodes(self.graphs, times)
        if self._adapters is not None:
            self._capture_decodes(self._adapter_graphs, times)
            self._adapters.rest()
        for room, graphs in self.prefill_graphs.items():
            for size in reversed(graphs.sizes):
                inputs, padding = graphs.inputs(size), self._padding(size)
                arrays = token_arrays(StepBatch.of([]), self._block_size, size)
                upload_into(inputs.flatten(), arrays.ravel())
                batch = StepBatch.of([padding])
                metadata = batch.metadata(inputs[2], graph_decodes=min(room, size))
                self._attention.plan(metadata)
                graphs.capture(size, partial(self._forward, inputs), times.library(size))

    def _share(self, x: Tensor) -> None:
        """Overwrite x by the x of the engine's rank 0."""
        self.model.communicator.stages.broadcast(x)
        self.model.communicator.broadcast(x)

    def _capture_decodes(self, graphs: StepGraphs, times: ProductTimes) -> None:
        for size in reversed(graphs.sizes):
            batch = StepBatch.of([_PADDING_SLICE] * size)
            inputs = graphs.inputs(size)
            arrays = decode_arrays(batch, self._block_size, size)
            upload_into(inputs.flatten(), arrays.ravel())
            self._attention.plan(batch.metadata(inputs[2], is_graph=True))
            if graphs is self._adapter_graphs and self._adapters is not None:
                self._adapters.plan([], [], size)
            graphs.capture(size, partial(self._decode, inputs), times.library(size))

    def make_graphs(self, times: ProductTimes) -> None:
        """Create all graphs, not yet captured: sizes for which no larger size is faster, and the
        largest of each kind, which cannot be exceeded."""

        def fast(sizes: Sequence[int]) -> list[int]:
            largest = sizes[-1]
            padded = {times.padded(size) for size in sizes}
            return [*sorted(size for size in padded if size < largest), largest]

        self.graphs = StepGraphs(fast(self._decode_sizes), 6, self._device)
        self._adapter_graphs = StepGraphs(self.graphs.sizes, 6, self._device, self.graphs)
        largest_kind: StepGraphs | None = None
        kinds = sorted(self._prefill_sizes.items(), key=lambda kind: -kind[1][-1])
        for room, each in kinds:
            self.prefill_graphs[room] = StepGraphs(fast(each), 4, self._device, largest_kind)
            largest_kind = largest_kind or self.prefill_graphs[room]

    @property
    def mixed_rows(self) -> tuple[int, ...]:
        """Sizes, ascending, of the graphs of decodes and prompts that have room for all decodes.
        Graphs with room for fewer decodes have the same sizes up to a largest of their own."""
        most = max(self.prefill_graphs)
        return tuple(self.prefill_graphs[most].sizes) if most else ()

    @property
    def most_graph_tokens(self) -> int:
        """The maximum number of tokens of a step in a graph, padding included."""
        return max(each.sizes[-1] for each in (self.graphs, *self.prefill_graphs.values()))

    def count_in(self, count: CudaStepCount) -> None:
        """Count later steps in `count`: the number of the last step that has written its KV."""
        self._count = count

    def launch(self, batch: Sequence[SequenceSlice]) -> GpuStep:
        with device_errors(), torch.inference_mode():
            batch = StepBatch.of(batch)
            slots = [] if self._adapters is None else batch.adapter_slots
            has_adapters = any(slot is not None for slot in slots)
            graphs = self._adapter_graphs if has_adapters else self.graphs
            all_sample = all(piece.sample is not None for piece in batch.others)
            is_decode = all_sample and batch.num_decodes == len(batch)
            graph = graphs.find(len(batch.logits_indices)) if is_decode else None
            if graph is not None:
                if has_adapters and self._adapters is not None:
                    self._adapters.plan(batch.query_lens, slots, graph.size)
                return self._launch_graph(graph, batch)
            return self._launch_eagerly(batch)

    def sample_states(self, batch: Sequence[SequenceSlice], hidden: Tensor) -> GpuStep:
        """Launch a step of decodes whose hidden states have been computed: it only samples."""
        with device_errors(), torch.inference_mode():
            self._begin()
            return self._sample(0, StepBatch.of(batch), hidden)

    # -- decodes alone ----------------------------------------------------------------------------

    def _launch_graph(self, graph: StepGraph, batch: StepBatch) -> GpuStep:
        num_rows = len(batch.logits_indices)
        padding = [_PADDING_SLICE] * (graph.size - num_rows)
        padded = StepBatch(batch.decodes, [*batch.others, *padding])
        inputs = self.graphs.inputs(graph.size)
        arrays = decode_arrays(batch, self._block_size, graph.size)
        upload_into(inputs.flatten(), arrays.ravel())
        self._attention.plan(padded.metadata(inputs[2], is_graph=True))
        self._begin()
        self._graphed.replay(graph)
        number = self._mark()
        if not self.model.range.is_last:
            return self._bring_back(number, batch, self.sampled, None)
        at = range(num_rows)
        self._resample(batch, at, graph.output)
        number = self._let_head_follow(number, batch, at)
        extras = self._extras(batch, graph.output, None)
        return self._bring_back(number, batch, self.sampled, extras)

    def _decode(self, inputs: Tensor) -> Tensor:
        """The content of a graph: model and sampler over the fixed inputs [6, decodes] -> this
        rank's logits; on a stage that is not the last, the model alone -> its output."""
        n = inputs.shape[1]
        hidden = self._forward(inputs[:4])
        keys, temperatures = inputs[4:]
        if not self.model.range.is_last:
            return hidden
        logits = self.model.lm_head.project_part(hidden)
        sample_unfiltered(
            logits,
            temperatures.view(torch.float64),
            keys,
            self.sampled[:n],
            self._logprobs[:n],
            self._part,
        )
        return logits

    # -- anything else ----------------------------------------------------------------------------

    def _hidden(self, batch: StepBatch) -> Tensor:
        """The hidden states of the batch's tokens, which those of padding may follow."""
        num_tokens, adapters = sum(batch.query_lens), self._adapters
        has_adapters = adapters is not None and adapters.plan_step(
            batch.query_lens, batch.adapter_slots, num_tokens
        )
        found = None if has_adapters else self._find_prefill_graph(batch)
        if found is None:
            arrays = token_arrays(batch, self._block_size, num_tokens)
            inputs = upload(arrays, self._device)
            self._attention.plan(batch.metadata(inputs[2]))
            self._begin()
            return self.model.forward(*self._filled(inputs), self._attention)
        room, graph = found
        inputs = self.prefill_graphs[room].inputs(graph.size)
        arrays = token_arrays(batch, self._block_size, graph.size)
        upload_into(inputs.flatten(), arrays.ravel())
        padding = [self._padding(graph.size - num_tokens)] if num_tokens < graph.size else []
        padded = StepBatch(batch.decodes, [*batch.others, *padding])
        self._attention.plan(padded.metadata(inputs[2], graph_decodes=min(room, graph.size)))
        self._begin()
        self._graphed.replay(graph)
        return graph.output

    def _find_prefill_graph(self, batch: StepBatch) -> tuple[int, StepGraph] | None:
        """The graph for `batch`, as (decode tokens that it has room for, graph); None if there is
        none."""
        lens, num_slices = batch.query_lens, batch.num_decodes
        num_rows, num_tokens = sum(lens[:num_slices]), sum(lens)
        if not 0 < len(batch) - num_slices < MAX_GRAPH_SLICES:
            return None
        prompts = zip(lens[num_slices:], batch.seq_lens[num_slices:], strict=True)
        is_long = sum(num * keys for num, keys in prompts) > _MAX_PROMPT_PAIRS
        for room in sorted(room for room in self.prefill_graphs if room >= num_rows):
            most = self.mixed_tokens if room else 0 if is_long else _MAX_PROMPT_TOKENS
            graph = self.prefill_graphs[room].find(num_tokens)
            if graph is not None and num_tokens - num_rows <= most:
                return room, graph
        return None

    def _padding(self, num_tokens: int) -> SequenceSlice:
        table = array("i", [PADDING_BLOCK]) * -(-num_tokens // self._block_size)
        return SequenceSlice((0,) * num_tokens, start=0, block_table=table, sample=None)

    def _launch_eagerly(self, batch: StepBatch) -> GpuStep:
        hidden = self._hidden(batch)
        number = self._mark()  # its KV is written: pullers need not wait for the sampler
        if not self.model.range.is_last:
            return self._bring_back(number, batch, self.sampled, None)
        return self._sample(number, batch, hidden)

    def _sample(self, number: int, batch: StepBatch, hidden: Tensor) -> GpuStep:
        indices = batch.logits_indices
        num_rows, at = len(indices), places_of_samples(batch)
        if not num_rows:
            number = self._let_head_follow(number, batch, at)
            extras = self._extras(batch, None, hidden)
            return self._bring_back(number, batch, self.sampled, extras)
        arrays = np.vstack([np.array(at), np.array(indices), sampling_arrays(batch)])
        places, tokens, keys, temperatures = upload(arrays, self._device)
        logits = self.model.lm_head.project_part(hidden.index_select(0, tokens))
        sampled, logprobs = self.sampled.new_empty(num_rows), self._logprobs[:num_rows]
        sample_unfiltered(
            logits, temperatures.view(torch.float64), keys, sampled, logprobs, self._part
        )
        self.sampled.index_copy_(0, places, sampled)
        self._resample(batch, at, logits)
        number = self._let_head_follow(number, batch, at)
        extras = self._extras(batch, logits, hidden)
        sampled = self.sampled.index_select(0, places)
        return self._bring_back(number, batch, sampled, extras)

    # -- both -------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Record the step's beginning: after its uploads, before the model's first kernel."""
        self._begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._begun.record()

    def _mark(self) -> int:
        """Count the step, if all of its KV has been launched, and return its number; 0 if it is not
        counted, or a head's KV is still to come."""
        return 0 if self._count is None or self.head is not None else self._count.mark()

    def _let_head_follow(self, number: int, batch: StepBatch, at: Sequence[int]) -> int:
        """Launch the head, if there is one, after the sampler, whose tokens are at the places `at`.
        Returns the step's number, which is `number` without a head."""
        if self.head is None:
            return number
        assert self.model.kept is not None
        self.head.follow(batch, self.model.kept, self.sampled, at)
        return 0 if self._count is None else self._count.mark()

    def _filled(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, positions and slots of `inputs` [4, tokens], with the previous step's sampled
        tokens in the places of those that are awaited."""
        token_ids, positions, slots, places = inputs
        fill_in(token_ids, places, self.sampled)
        return token_ids, positions, slots

    def _forward(self, inputs: Tensor) -> Tensor:
        """The model's part of a graph."""
        return self._graphed.forward(*self._filled(inputs), self._attention)

    def _resample(self, batch: StepBatch, at: Sequence[int], logits: Tensor) -> None:
        """Sample rows that need filters or changed logits again, into the places `at`. `logits` are
        this rank's, parallel to the rows; for the resampled rows all ranks' are gathered."""
        special = special_rows(batch)
        if special:
            places = np.array([special, [at[index] for index in special]], np.int64)
            index, place = upload(places, self._device)
            whole = self.model.lm_head.gather(logits.index_select(0, index))
            token_ids, logprobs = sample(whole, [*map(batch.spec, special)])
            # Unlike the plain sampler's, sums over a sorted row may differ in the last bit from run
            # to run, and all ranks must continue with the same token.
            self.model.communicator.broadcast(token_ids)
            self.sampled.index_copy_(0, place, token_ids)
            self._logprobs.index_copy_(0, index, logprobs)

    def _extras(
        self, batch: StepBatch, logits: Tensor | None, hidden: Tensor | None
    ) -> Extras | None:
        if not batch.has_extras:
            return None
        head = self.model.lm_head
        return compute_extras(batch, logits, hidden, head.project, head.gather)

    def _bring_back(
        self, number: int, batch: StepBatch, token_ids: Tensor, extras: Extras | None
    ) -> GpuStep:
        """Copy the rows' results, which the last stage has, to the host, after all that was
        launched. Every step with results is collected; until then it owns their pinned memory."""
        n = len(batch.logits_indices) if self.model.range.is_last else 0
        host_ids = torch.empty(n, dtype=torch.int64, pin_memory=True)
        host_logprobs = torch.empty(n, dtype=torch.float32, pin_memory=True)
        write_results(token_ids, self._logprobs, host_ids, host_logprobs)
        is_done = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        is_done.record()
        return GpuStep(number, batch, host_ids, host_logprobs, extras, self._begun, is_done)


def _part_of_rank(model: StepModel) -> VocabularyPart | None:
    """The rank's part of the vocabulary; None if the rank has all of it."""
    ranks = model.communicator
    if ranks.size == 1 or model.has_whole_logits:
        return None
    return VocabularyPart(ranks.rank, ranks.size, model.vocab_size, ranks.all_reduce)
