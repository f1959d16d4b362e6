"""The native inference server: HTTP interface, engine, scheduler, paged KV cache, model runner."""
