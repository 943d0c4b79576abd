"""The functional core: pure decisions over plain values; numpy and the standard library only."""
