"""One request in the gateway, from its arrival to its end."""
