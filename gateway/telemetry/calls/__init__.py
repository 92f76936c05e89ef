"""One call: its record, figures, stages, log line, spans."""
