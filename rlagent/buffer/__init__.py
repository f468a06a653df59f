"""The durable data buffer."""

from rlagent.buffer.buffer import Buffer
from rlagent.buffer.leases import RestoreReport
from rlagent.buffer.ledger import LedgerEntry
from rlagent.buffer.policies import Publish
from rlagent.buffer.status import BufferStatus, IncompleteGroup

__all__ = ["Buffer", "BufferStatus", "IncompleteGroup", "LedgerEntry", "Publish", "RestoreReport"]
