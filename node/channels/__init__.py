"""How an engine is reached: sockets, frames, the inbox."""
