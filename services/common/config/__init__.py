"""The configuration of every process: frozen, typed models that refuse unknown keys and state each default
once. `settings_tree` has them as one tree, and reads them.

`baton up` resolves file, environment and flags into these and passes each child its own as JSON. A misspelt
key is an error, since a silently lost setting costs more than a refused start. Any part but `baton.engine`
and `kvtransfer` may import it; it imports neither torch nor grpc.
"""
