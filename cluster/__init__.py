"""The cluster: directory of members on Redis, private Redis server, shared secret, TLS, leases."""
