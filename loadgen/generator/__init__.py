"""Many processes that send to one clock, and who starts and watches them."""
