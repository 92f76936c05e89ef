"""What `bench.cpu` measures, a family of figures a file."""
