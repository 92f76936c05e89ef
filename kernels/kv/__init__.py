"""KV blocks: rotate, store and copy keys and values."""
