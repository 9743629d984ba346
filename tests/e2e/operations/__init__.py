"""Commands, and what is promised of the processes that they start."""
