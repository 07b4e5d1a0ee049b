"""Every tensor that a sequence keeps alive, found by following references and not by asking it."""

from collections.abc import Iterator

from torch import Tensor

from kvtune.policies.plane import planes_within


def uncounted(sequence) -> dict[str, int]:
    """Bytes of the tensors that live as long as a sequence and that it does not name, by path.

    What all sequences share is left out: the engine's pools, rotations, calibrations, constants.
    """
    planes = [
        plane
        for layer in sequence.layers
        for outer in layer.planes()
        for plane in planes_within(outer)
    ]
    shared = [plane.constants for plane in planes]
    for layer in sequence.layers:
        setup = layer.setup
        shared += [setup.engine, setup.calibration, setup.rope]
    known = {_storage(tensor) for _, tensor in _walk("shared", shared, set())}
    known |= {_storage(tensor) for tensor in sequence.tensors().values()}
    return {
        path: tensor.numel() * tensor.element_size()
        for path, tensor in _walk("sequence", sequence, set())
        if tensor.numel() and _storage(tensor) not in known
    }


def unnamed(sequence) -> dict[str, int]:
    """Bytes of the tensors that a sequence's planes use and that are no held ones or constants.

    What was learned counts too: a plane that reads it at every step names it as a constant.
    """
    planes = [
        plane
        for layer in sequence.layers
        for outer in layer.planes()
        for plane in planes_within(outer)
    ]
    engines = [layer.setup.engine for layer in sequence.layers]
    pools = [thing for engine in engines for thing in engine.values() if hasattr(thing, "tensors")]
    shared = [pools, *(plane.constants for plane in planes)]
    known = {_storage(tensor) for _, tensor in _walk("shared", shared, set())}
    known |= {_storage(tensor) for tensor in sequence.tensors().values()}
    return {
        path: tensor.numel() * tensor.element_size()
        for path, tensor in _walk("planes", planes, {id(engine) for engine in engines})
        if tensor.numel() and _storage(tensor) not in known
    }


def _storage(tensor):
    return tensor.untyped_storage().data_ptr()


def _walk(path, thing, visited) -> Iterator[tuple[str, Tensor]]:
    if isinstance(thing, Tensor):
        yield path, thing
        return
    if id(thing) in visited:
        return
    visited.add(id(thing))
    if isinstance(thing, dict):
        parts = thing.items()
    elif isinstance(thing, list | tuple | set | frozenset):
        parts = enumerate(thing)
    elif type(thing).__module__.startswith("kvtune"):
        slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        parts = [(name, getattr(thing, name)) for name in slots if hasattr(thing, name)]
        parts += getattr(thing, "__dict__", {}).items()
    else:
        return
    for name, part in parts:
        yield from _walk(f"{path}.{name}", part, visited)
