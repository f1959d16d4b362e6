"""Resources servers."""
