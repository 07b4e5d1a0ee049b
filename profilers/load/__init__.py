"""The load client: replays requests against an OpenAI-compatible server and times every token.

`request` makes the bytes that are sent, `arrivals` decides when, `http` moves them, `sse` and
`answer` read what comes back, `client.replay` ties them together into a `LoadRun`, and `runtime`
keeps the process out of the way of the clock. Run it with `runtime.run(replay(...))`.
"""
