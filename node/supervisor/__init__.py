"""The process beside the engines: gRPC, membership, restarts."""
