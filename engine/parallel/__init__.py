"""Several ranks as one engine: processes, messages, sums."""
