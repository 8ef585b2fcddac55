"""Adapters in the layouts servers read, back from them, and the proof that both are the same."""
