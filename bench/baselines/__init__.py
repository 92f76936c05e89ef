"""The schemes of the history of serving systems, compared over the same engine."""
