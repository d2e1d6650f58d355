"""Lists every private name of torch that fullshard uses, one module per engine. Other rooms import them here.

A module of this room fails at import if torch lacks one of its names. Where torch has a public way, use that.
"""
