"""Measurements that ship with the program: ``moechat bench``, or ``python -m moechat.bench``.

In the order in which things happen, for all of them:

    settings     what may be asked for; read from either command line
    command      a measurement, then its output
    reading      plain reading of the weights: what everything is compared with
    bursts       turns between readings
    phases       where the time of a burst went
    machine      what a report says of where it was made
    table, drawing, pictures, status_line    what people see

What is measured: ``kernels`` (the experts of one layer), ``model`` (a whole model that is here),
``synthetic`` (a model that is not).
"""
