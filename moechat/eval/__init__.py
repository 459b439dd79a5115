"""How good a model's answers are here: ``moechat eval``.

In the order in which things happen, for all of it:

    settings        what may be asked for
    command         a measurement, then its output
    outcome         Ctrl-C, notes and seconds of a measurement
    progress        how long the rest takes
    texts           files of text or of chats, and windows of their tokens
    likelihood      perplexity from logits
    ppl             perplexity of a file
    needle          a fact in a long text, and the question for it
    crossing        a prompt through the KV path, and what that cost
    policies, kv    every KV policy: perplexity, needles, bytes
    probe           whether a model bears INT4 KV
    report, picture what people see
"""
