"""What calibrated methods learn from a model before they can run, and how it is kept.

A calibration belongs to one model: it carries a hash of the weights it was made from, and is
refused on any other.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from kvtune.errors import BadInput
from kvtune.lazy import lazy_import
from kvtune.policies.method import LayerShape, Method, Role

if TYPE_CHECKING:
    from safetensors import torch as safetensors_torch
    from torch import Tensor
else:
    safetensors_torch = lazy_import("safetensors.torch")

Learned = dict[str, "Tensor"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LayerSamples:
    """What a model did in one layer with sample text.

    vectors [Hk, N, d]: keys before RoPE (after any key norm), or values. gradients: those of the
    language-model loss, same shape, when the method asked for them. inputs [N, hidden]: what
    entered the projection; weight [Hk * d, hidden] and bias [Hk * d] of it.
    """

    shape: LayerShape
    role: Role
    vectors: Tensor
    inputs: Tensor
    weight: Tensor
    bias: Tensor | None
    gradients: Tensor | None = None


class CalibratedMethod(Method, ABC):
    """A method that must learn from the model first."""

    needs_gradients: ClassVar[bool] = False

    @abstractmethod
    def calibrate(self, samples: LayerSamples) -> Learned:
        """Return what the method's planes of this layer and role need, by name."""

    @property
    def calibration_key(self) -> str:
        """Identifies what was learned: method and the parameters it depends on."""
        return self.fingerprint


@dataclass(frozen=True, slots=True)
class Calibration:
    """What one method learned from one model: tensors by (layer, role) and name."""

    method: str
    key: str
    model_hash: str
    learned: Mapping[tuple[int, Role], Mapping[str, Tensor]]

    def check(self, method: CalibratedMethod, model_hash: str) -> None:
        """Raise unless it was made for this method on this model.

        Raises:
            BadInput: it belongs to another model, or to other parameters.
        """
        if self.model_hash != model_hash:
            raise BadInput(
                f"this calibration of {self.method} was made from other weights "
                f"({self.model_hash}, the model here is {model_hash})",
                fix="calibrate again with this model",
            )
        if self.key != method.calibration_key:
            raise BadInput(
                f"this calibration was made for other parameters of {self.method}",
                fix="calibrate again with these parameters",
            )

    def save(self, path: Path) -> None:
        """Write it to a safetensors file."""
        flat = {
            f"{layer}.{role}.{name}": tensor.contiguous()
            for (layer, role), tensors in self.learned.items()
            for name, tensor in tensors.items()
        }
        about = {"method": self.method, "key": self.key, "model_hash": self.model_hash}
        safetensors_torch.save_file(flat, path, metadata={"kvtune": json.dumps(about)})

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Read what `save` wrote.

        Raises:
            BadInput: the file is missing or not a calibration.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["kvtune"])
                belongs = about["method"], about["key"], about["model_hash"]
                learned: dict[tuple[int, Role], dict[str, Tensor]] = {}
                for full in file.keys():  # noqa: SIM118
                    layer, role, name = full.split(".", 2)
                    own = learned.setdefault((int(layer), _role(role)), {})
                    own[name] = file.get_tensor(full)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise BadInput(
                f"{path} is not a calibration: {error}", fix="calibrate again"
            ) from error
        return cls(*belongs, learned)


def made_once(
    engine: dict[Any, Any], key: Hashable, learned: Mapping[str, Tensor], make: Callable[[], T]
) -> T:
    """What `make` makes of something learned, once for all sequences of an engine.

    It is made again when the calibration has been replaced.
    """
    made: tuple[Mapping[str, Tensor], T] | None = engine.get(key)
    if made is None or made[0] is not learned:
        made = engine[key] = learned, make()
    return made[1]


def _role(text: str) -> Role:
    if text == "key":
        return "key"
    if text == "value":
        return "value"
    raise BadInput(f"a calibration names the role {text!r}", fix="calibrate again")
