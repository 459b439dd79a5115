"""``bench model``: prefill and decode of a whole model, beside plain reading of its files.

In order: ``weight_bytes`` (what a token has to read), ``probes`` (prefill, decode and sampling of
an open engine), ``measure`` (at growing lengths, in turns with reading), ``report`` (rows, tables).
"""
