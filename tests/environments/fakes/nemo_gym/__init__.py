"""A tiny nemo_gym with the names that the adapter uses."""
