"""The hand-off: tickets, leases, manifests, and the transports that move KV blocks."""
