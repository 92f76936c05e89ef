"""HTTP beneath the routes: connections, bodies, errors, event streams."""
