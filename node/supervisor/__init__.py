"""The parent process of the engines: gRPC, membership, restarts."""
