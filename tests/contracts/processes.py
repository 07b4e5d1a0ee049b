"""Whether processes that a test caused are gone."""

import psutil


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; one that has ended and that nobody has reaped yet does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
