"""Who may call the gateway: API keys, tenants and their limits, TLS."""
