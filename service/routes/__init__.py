"""One module per thing a client can ask for."""
