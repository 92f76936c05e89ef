"""The scripts that made the bundled models and their adapter, as models/README.md describes."""
