"""The highest arrival rate that holds the limits."""
