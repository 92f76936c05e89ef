"""KV blocks: rotate, store, move."""
