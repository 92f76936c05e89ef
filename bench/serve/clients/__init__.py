"""Load generation: sends a mix of requests to a system and records the results."""
