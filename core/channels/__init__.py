"""Connections between two processes: addresses, frames, the handshake."""
