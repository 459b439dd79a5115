"""``bench kernels``: how near the experts' kernels come to the speed of reading memory.

In order: ``experts`` (their shape, and which of them each call uses), ``stored_matrix`` and
``expert_weights`` (random weights in a mapped file), ``expert_layer`` (a native model of them, its
results compared with the reference kernels), ``measure`` (bursts), ``report`` (rows, table).
"""
