"""What a decode step does besides the model: mailbox, plan, output ring; and the row operations between
products."""
