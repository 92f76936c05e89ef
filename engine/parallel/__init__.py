"""One engine of several ranks: processes, messages, collectives."""
