"""Open-loop load on a serving system, seen by its clients: arrivals, drivers, records, reports."""
