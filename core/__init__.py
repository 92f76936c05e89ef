"""Basic types and tools of all other packages; imports no other package of Baton."""
