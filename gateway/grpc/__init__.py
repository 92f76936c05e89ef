"""The gRPC fronts: ours, and the one of vLLM."""
