"""Numbers for people."""
