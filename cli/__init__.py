"""Commands: baton, launch_gateway, launch_prefill, launch_decode."""
