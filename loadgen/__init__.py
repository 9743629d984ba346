"""A load generator for streamed language models; speaks to public APIs only."""
