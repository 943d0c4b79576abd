"""The four seams every trainer passes through: loss tap, clip tap, step gate, safe point."""
