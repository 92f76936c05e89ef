"""One call in figures: observers, stages, logs, traces."""
