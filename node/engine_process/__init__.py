"""The engine process and its one loop."""
