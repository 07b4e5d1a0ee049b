"""A tree that does not want to end: every process ignores SIGTERM and SIGINT.

Writes the pid of each process to the file named by the first argument: this one, a child, an
orphan of a double fork, and one in a session of its own.
"""

import os
import signal
import sys
import time
from pathlib import Path


def settle(path):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Path(path).open("a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(300)


path = sys.argv[1]
if os.fork() == 0:
    settle(path)
if os.fork() == 0:
    if os.fork() == 0:
        settle(path)
    os._exit(0)
if os.fork() == 0:
    os.setsid()
    settle(path)
if len(sys.argv) > 2:
    time.sleep(0.5)
    sys.exit(int(sys.argv[2]))
settle(path)
