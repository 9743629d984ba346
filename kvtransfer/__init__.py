"""Moves blocks of a KV cache from a sender to a receiver: completely, once, into their place, or not at all.

    protocol    the wire format: frames, checksums, pieces, tickets, endpoints, the handshake
    link        what both ends of a link share: the interfaces of a transport, staging, queues
    sender      the sending end: transfers, links, credits, the choice of a transport
    receiver    the receiving end: expected transfers, links, their events
    device      blocks in device memory: gather and scatter kernels with checksums, quantisation
    transports  grpc over the network, ipc through shared memory of one host, nccl between GPUs

`Sender` and `Receiver` are each polled by one loop. The package knows nothing of engines, roles or requests;
it imports `baton.device` and the wire's messages, and only `services.worker.engine` and benchmarks import it.
"""
