"""Inspection of a running cluster: survey, ledgers, consistency checks."""
