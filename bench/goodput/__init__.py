"""The rate at which requests keep their targets, of whole systems over HTTP."""
