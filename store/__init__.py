"""What happened before: studies, trials, raw records and what was handed over.

`open_store` opens the history. Importing this package loads SQLAlchemy, so the command line does it
only in the commands that need it.
"""

from kvtune.store.database import Store, open_store
from kvtune.store.key import point_key
from kvtune.store.rows import (
    AttemptRow,
    AttemptStatus,
    EmittedRow,
    ImportReport,
    ProfileRow,
    Reference,
    StudyRow,
    StudySummary,
    TrialRow,
)

__all__ = [
    "AttemptRow",
    "AttemptStatus",
    "EmittedRow",
    "ImportReport",
    "ProfileRow",
    "Reference",
    "Store",
    "StudyRow",
    "StudySummary",
    "TrialRow",
    "open_store",
    "point_key",
]
