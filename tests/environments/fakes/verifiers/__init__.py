"""A tiny verifiers with the names that the adapter uses."""
