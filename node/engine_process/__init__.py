"""The engine process and its main loop."""
