"""The live page: what the cluster does now, sent once a second over server-sent events."""
