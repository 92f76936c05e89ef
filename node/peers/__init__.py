"""An engine's peers: what it lends to them, and what it pulls from them."""
