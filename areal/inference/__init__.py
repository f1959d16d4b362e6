"""Owns the native inference engine and its HTTP server."""
