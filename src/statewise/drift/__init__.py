"""Drift between two policies: how far the states moved that they visit, and where their predictions moved."""
