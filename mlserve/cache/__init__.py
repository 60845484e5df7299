"""Naming, sharing and evicting KV blocks. Imports no torch."""
