"""One request to one kind of server, and what became of it."""
