"""What both kinds of node share: supervisor, engine process, rpc server, registration."""
