"""The cluster-wide prefix index: engines publish what they have cached, gateways mirror it."""
