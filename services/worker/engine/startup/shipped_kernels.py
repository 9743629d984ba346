"""Kernels that an image brings along: copied into the kernel cache before anything is compiled."""

from __future__ import annotations

import os
from pathlib import Path

from baton.device.kernel_files.cache import copy_shipped_kernels, keep_kernels_in
from baton.device.kernel_files.environment import kernels_here
from baton.device.kernel_files.manifest import SHIPPED_VARIABLE, KernelManifest
from services.common.config.worker import EngineConfig
from services.common.observability.logs import get_log
from services.worker.engine.startup.model_loader import device_of

log = get_log(__name__)


def use_kernel_cache(engine: EngineConfig) -> None:
    """Sets the configured cache and adds the image's kernels to it; without them they are compiled."""
    if engine.kernel_cache is None:
        return
    keep_kernels_in(engine.kernel_cache)
    if not (shipped := os.environ.get(SHIPPED_VARIABLE)):
        return
    try:
        copied = copy_shipped_kernels(Path(shipped), Path(engine.kernel_cache).expanduser())
        log.info("kernels_copied", files=copied)
        _compare(Path(shipped), engine)
    except OSError as error:
        log.warning("kernels_not_copied", folder=shipped, reason=error.strerror)


def _compare(shipped: Path, engine: EngineConfig) -> None:
    """Warns where the image's kernels were compiled with something else: the start then takes longer."""
    device = device_of(engine)
    manifest = KernelManifest.read(shipped)
    if device.type != "cuda" or manifest is None:
        return
    if found := manifest.differences(kernels_here(device.index)):
        log.warning("kernels_differ", folder=str(shipped), compiled_with_and_here=found)
