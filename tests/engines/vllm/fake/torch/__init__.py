"""Stand-in for torch: remembers the number of threads, and computes nothing."""

_threads = 2


def set_num_threads(threads):
    global _threads
    _threads = threads


def get_num_threads():
    return _threads
