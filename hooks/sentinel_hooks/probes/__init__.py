"""Probes: tensors in, a few scalars out, without waiting for the device."""
