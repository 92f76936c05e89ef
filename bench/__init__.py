"""What the project claims of its speed is measured here: docs/benchmarks.md."""
