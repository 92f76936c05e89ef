"""A puller's access to a source's pool: the contract of all transports."""
