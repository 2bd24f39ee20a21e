"""Wall-clock time by kind of pass, with GPUs waited for."""

import time
from collections.abc import Hashable, Iterable, MutableMapping

import torch


class Clock:
    """Charges the time since the last lap to a key of `seconds`; a lap ends when the GPUs among its devices are done."""

    def __init__(self, seconds: MutableMapping[Hashable, float]) -> None:
        self.seconds, self.last = seconds, time.perf_counter()

    def skip(self, devices: Iterable[torch.device]) -> None:
        """Begin a lap."""
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self.last = time.perf_counter()

    def lap(self, key: Hashable, devices: Iterable[torch.device]) -> None:
        """End a lap, which was the key's."""
        began = self.last
        self.skip(devices)
        self.seconds[key] += self.last - began
