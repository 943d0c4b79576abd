"""Adapter for a plain loop: the user hands over the objects."""
