"""The cluster on Redis: directory of members, private server, shared secret."""
