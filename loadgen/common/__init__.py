"""Settings, the record of a request, and formatting. Every folder of loadgen may import it; it imports none
of them."""
