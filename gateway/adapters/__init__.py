"""LoRA adapters that a gateway serves by name."""
