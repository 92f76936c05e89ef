"""The live page: what the cluster does now, told once a second over server-sent events."""
