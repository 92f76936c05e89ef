"""LoRA adapters of an engine: files, host memory, slots on the device, who may run with which."""
