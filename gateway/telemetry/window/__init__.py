"""The telemetry of the last minutes and the last hour, of all gateways."""
