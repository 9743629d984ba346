"""Moves blocks of a KV cache from a sender to a receiver: whole, once, into their place, or not at all.

    ticket, ticket_book          the receiver's promise, and the states it passes through
    sender, receiver             the two ends, each polled by one loop
    outgoing, incoming           one transfer at either end
    sending_link, receiving_link one link at either end: credits (sending_window) there, staging here
    receiving_links, open_calls  all of a receiver's, and senders that ask for one
    staging, checksum, geometry  where bytes land, how they are verified, how blocks are cut
    moving, resplit, eight_bit   gather and scatter on the device: converted, for other ranks, in eight bits
    gpu                          the kernels that do it
    frames, opening, events      what the ends say to each other, and to their loops
    transport, transports        what a transport must do, and which there are
    routes                       which of them a link takes
    grpc_*, inbox                frames over the network
    ipc_*, byte_ring             pieces and frames through memory that both ends map, within one host
    nccl_*                       pieces by NCCL, from one GPU to another, and frames over the network
    device_*, row_mover, block_reads  what links between devices have in common

Knows nothing of engines, roles or requests; usable by itself.
"""
