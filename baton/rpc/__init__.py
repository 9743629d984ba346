"""gRPC as every process uses it: errors on the wire, options of connections, checks of calls. Any package may
import it."""
