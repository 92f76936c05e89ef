"""A source's pool as a puller reaches it: the contract of all transports."""
