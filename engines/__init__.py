"""How to run a model under a set of engine arguments: one module or package per engine."""
