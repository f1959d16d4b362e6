"""A tiny uvicorn."""
