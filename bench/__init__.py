"""Benchmarks behind every claim that the project makes about speed: docs/benchmarks.md."""
