"""What a push tells the driver, which unpickles it and has no torch: so this is not in the package that pushes, which imports it."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """checksum: sha256 over all tensors' checksums in the order they were sent; "" when none was computed this time.

    num_bytes: of the policy; sent_bytes: what travelled for it (a delta is smaller).
    seconds: by stage ("gather" from the learner, "send", "end", "verify"). verified: "yes", or why not.
    """

    version: int
    num_bytes: int
    num_buckets: int
    sent_bytes: int
    checksum: str
    verified: str
    seconds: Mapping[str, float] = field(default_factory=dict)
