"""Workers on Ray: a Ray node that `baton up` owns, actors that each run one worker's process, and the nodes
that have room for them. Imported by the two programs beside it; the only package that imports Ray.
"""
