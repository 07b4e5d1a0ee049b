"""vLLM as an engine: an owned process tree, started cold or forked from a warm parent.

`engine` ties the parts together. `plugin` is loaded by vLLM itself, where kvtune is installed
beside it. `guard`, `warm_parent`, `probe` and `argument_check` are scripts
that run by path under the engine's own interpreter, which may be another environment than
kvtune's: they use the standard library (and vLLM) only, never kvtune.
"""
