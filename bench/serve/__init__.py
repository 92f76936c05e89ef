"""Open-loop load on a serving system, as clients see it: arrivals, drivers, records, reports."""
