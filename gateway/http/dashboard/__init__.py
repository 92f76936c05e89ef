"""The live page: the cluster's current state, sent once a second over server-sent events."""
