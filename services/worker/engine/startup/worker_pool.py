"""The pool a worker belongs to: the workers that may compute parts of one request."""

from __future__ import annotations

from baton.v1.worker_pb2 import Pool
from services.common.config.worker import WorkerConfig
from services.worker.engine.startup.model_loader import LoadedModel


def pool_of(config: WorkerConfig, model: LoadedModel) -> Pool:
    """Everything that two workers must have in common for a request to pass between them unchanged."""
    blocks = ",".join(str(group.block_tokens) for group in model.layout.groups)
    return Pool(
        model=config.served_name,
        checkpoint=model.checkpoint,
        tokenizer=model.tokenizer,
        kv_format=f"{model.layout.cache_dtype}/{blocks}/{config.transfer.kv_wire}",
        numerics="exact" if model.exact else "fast",
    )
