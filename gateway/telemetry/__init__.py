"""What the gateway measures of its work: metrics, traces, logs, and the live page's numbers."""
