"""Adapters: find the objects of a framework, and say where a safe point is."""
