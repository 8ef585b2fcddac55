"""A small server on the local engine, with the part of vLLM's HTTP API that k3tune's client uses.

Everything is in its modules; ``k3tune serve`` starts it.
"""
