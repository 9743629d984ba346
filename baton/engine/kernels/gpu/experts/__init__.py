"""A mixture of experts in a step: the router (`route_rows`), tiles of rows by expert
(`align_rows`), the experts' products (`grouped_linear`), and their weighted sum (`combine_rows`). No launch
depends on how rows are routed. Imported by `forward`.
"""
