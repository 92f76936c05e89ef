"""LoRA adapters of an engine: files, host memory, device slots, and sequences waiting for them."""
