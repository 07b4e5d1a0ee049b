"""A deterministic engine: a real server process whose timing follows a model of a paged KV cache.

`blocks` and `scheduler` are the cache and the scheduler, `costs` is the time a step takes; all
three are pure. `loop` runs them against the clock, `http` and `api` speak to clients, `server` is
the process and `engine` what kvtune holds of it. Only `engine` is meant to be imported from
elsewhere: the process imports nothing but the standard library, so that it starts quickly.
"""
