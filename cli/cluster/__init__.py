"""Looking at a running cluster: survey, ledgers, what must hold."""
