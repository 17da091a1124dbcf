"""Places that hold chunks."""
