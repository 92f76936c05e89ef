"""Which sequences run in a step: scheduler, admission, block tables."""
