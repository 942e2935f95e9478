"""Which source reads what a rank loads of a checkpoint, by the format that its index has."""

from __future__ import annotations

from ..core.formats.dcp_metadata import Megatron, StockDcp
from ..core.formats.index import Index
from ..core.formats.own import OwnIndex, OwnTorchSave
from ..core.formats.torch_file import TorchFile
from ..errors import CheckpointLoadError
from .foreign.dcp import StockDcpSource
from .foreign.megatron import MegatronSource
from .foreign.torch_file import TorchFileSource
from .ranges import RangeSource
from .source import Access, Source
from .torch_save import TorchSaveSource


def open_source(index: Index, access: Access, rank: int = 0, world_size: int = 1) -> Source:
    """What reads what a rank loads of a checkpoint.

    Args:
        index: the checkpoint
        access: how it is read
        rank: the rank
        world_size: number of ranks

    Raises:
        CheckpointCorruptError, CheckpointLoadError: see `Checkpointer.load`
    """
    if isinstance(index, OwnIndex):
        if index.per_rank and index.world_size not in (1, world_size):
            raise CheckpointLoadError(
                f"{index.where} was saved by {index.world_size} ranks with checkpoint/writer={index.format}, which "
                f"writes one file per rank, and there are {world_size} now; only checkpoints of checkpoint/writer=dcp "
                "load on another number of ranks."
            )
        rank = rank if index.world_size > 1 else 0
        source: Source = (
            TorchSaveSource(index, rank, access)
            if isinstance(index, OwnTorchSave)
            else RangeSource(index, index.of_rank(rank), access)
        )
        source.shared = not index.per_rank
        return source
    if isinstance(index, Megatron):
        return MegatronSource(index, access)
    if isinstance(index, StockDcp):
        return StockDcpSource(index, access)
    if isinstance(index, TorchFile):
        return TorchFileSource(index.storage, index.where, access)
    return RangeSource(index, index.contents, access)
