"""Baton: serve large language models with prefill and decode on different GPUs."""
