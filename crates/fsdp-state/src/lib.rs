//! State dicts: iterate, gather, broadcast, distribute, offload.
