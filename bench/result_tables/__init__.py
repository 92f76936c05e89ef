"""Tables in Markdown out of bench/results/*.json; `bench/report.py` puts them into pages."""
