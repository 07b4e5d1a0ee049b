"""Stand-in for vLLM: the modules kvtune touches, and a server that only looks like one.

It leaves a trace of every import, and fails or misbehaves as the environment asks.
"""

import os
import sys
from pathlib import Path

if trace := os.environ.get("FAKE_VLLM_IMPORTS"):
    with Path(trace).open("a") as file:
        file.write(f"{os.getpid()}\n")
if os.environ.get("FAKE_VLLM") == "broken-import":
    raise ImportError("libfake.so: cannot open shared object file")
if os.environ.get("FAKE_VLLM") == "garbage" and "warm_parent" in sys.argv[0]:
    os.write(int(sys.argv[1]), b"<html>not the protocol</html>\n")
if os.environ.get("FAKE_VLLM") == "dies" and "warm_parent" in sys.argv[0]:
    os._exit(3)
