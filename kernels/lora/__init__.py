"""LoRA: what the adapters of a step add to products with weights."""
