"""Learn new classes one at a time from a single pass over a stream, forgetting nothing."""

from pecil.pec import PEC
from pecil.pec.saving import ModelFileError

__all__ = ["PEC", "ModelFileError"]
__version__ = "0.1.0"
