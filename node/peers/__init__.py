"""An engine's peers: what they pull from it, and what it pulls from them."""
