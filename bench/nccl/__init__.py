"""Observes NCCL itself: costs, and peers that are killed, stopped or aborted. Imported by
`bench.transfer`."""
