"""The figures of `bench.cpu`, one family per file."""
