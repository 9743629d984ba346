"""From records to numbers, and whether to believe them."""
