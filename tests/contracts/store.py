"""What a store does on every database that it can be kept in."""

from contracts.store_history import HistoryContract
from contracts.store_processes import ProcessContract
from contracts.store_schema import SchemaContract
from contracts.store_transfer import TransferContract


class StoreContract(HistoryContract, ProcessContract, TransferContract, SchemaContract):
    """Subclass it with the fixtures `url`, a fresh database, and `other_url`, another one."""
