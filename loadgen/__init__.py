"""A load generator for streamed language models: finds the goodput, and says when a number is not to be
believed. It speaks to public APIs only (Baton's gRPC door, any OpenAI server) and needs no torch.

    load        what is sent and when: arrivals, prompts, traces
    targets     how it is sent: one request over gRPC or HTTP, and what became of it
    generator   many processes with one clock
    analysis    from records to numbers, intervals, the steady window and the verdict
    goodput     the search for the highest rate that holds the limits
    reports     numbers for people: terminal, HTML, Markdown, comparison
    commands    run, search, sweep, compare, report, trace
"""
