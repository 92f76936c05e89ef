"""The bundled models, `demo` and `demo-draft`, and a LoRA adapter of them."""
