"""What a client may request."""
