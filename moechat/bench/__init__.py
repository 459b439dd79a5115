"""Measurements that ship with the program: ``moechat bench``, or ``python -m moechat.bench``."""
