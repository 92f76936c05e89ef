"""The gateway process: start, parts, orderly end."""
