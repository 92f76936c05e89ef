"""launch_decode: pulls KV, runs the continuous batch."""
