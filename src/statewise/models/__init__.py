"""Models: loading, the one-pass head, scoring and sampling."""
