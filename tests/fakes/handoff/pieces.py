"""Pieces of blocks for tests: some heads of all layers."""

from __future__ import annotations

from baton.kv_transfer.window.block_pieces import BlockPiece, Span


def of_heads(
    there: int, here: int, count: int, num_there: int, num_here: int, *, num_layers: int
) -> BlockPiece:
    layers = Span(0, 0, num_layers, num_layers, num_layers)
    return BlockPiece(0, Span(there, here, count, num_there, num_here), layers)
