"""``bench --synthetic NAME``: what a model that is not here would do on this machine.

A model of the real shapes and few layers is built with random weights. Parts of it, opened side by
side, have fewer layers of some kind, or a smaller vocabulary: what a layer costs is the difference,
and the whole model the sum of so many of each.

In order: ``config`` (shapes from models.toml), ``tensors`` (what is stored of them), ``cut`` (as
much as fits), ``weights`` and ``folder`` (written for the time of a run), ``measure`` (its parts,
in turns), ``extrapolate`` (to the whole model), ``report``.
"""
