"""launch_gateway: the gRPC front door, sessions, routing, membership. No torch."""
