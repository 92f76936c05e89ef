"""What the gateway tells of its work: metrics, traces, logs, and the numbers of the dashboard."""
