"""A load generator for streamed language models: measures goodput, and rejects measurements that are not
valid.

It uses public APIs only (Baton's gRPC API, any OpenAI-compatible server) and needs no torch. No other package
imports it.

    common      settings, the record of a request, formatting
    load        arrivals, prompts, traces
    targets     one request over gRPC or HTTP, and its outcome
    generator   several processes with one clock
    analysis    figures, intervals, the steady window, validity
    goodput     the search for the highest rate that meets the limits
    reports     terminal, HTML, Markdown, comparison
    commands    run, search, sweep, compare, report, trace
"""
