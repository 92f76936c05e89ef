"""The bundled models, `demo` and `demo-draft`, and the script that trained them."""
