"""Stubs made by proto/generate.py from the .proto files beside them; do not edit."""
