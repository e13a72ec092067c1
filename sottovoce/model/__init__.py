"""The network as plain maths, and one slow path that defines right.

Knows nothing of batching policy, graphs, quantization, adapters or HTTP: speed and memory live beside it.
"""
