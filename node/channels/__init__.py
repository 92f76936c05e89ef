"""How an engine is reached: sockets, frames, inbox and outbox."""
