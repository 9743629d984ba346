"""What clients of the public APIs see."""
