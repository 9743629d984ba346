"""Shared memory between a worker's two processes: mailbox, output ring, logprob records, slots' positions and
heartbeat.
Imported by the engine and by the front process, so free of torch and of all other parts of the engine."""
