"""What annotations need of newer Pythons, where ``typing.get_type_hints`` looks for it, too."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

__all__ = ["Unpack"]

if TYPE_CHECKING:
    from typing_extensions import Unpack
elif sys.version_info >= (3, 11):
    from typing import Unpack
else:

    class Unpack:
        """Stands for ``typing.Unpack``: what is unpacked itself is then what is answered."""

        def __class_getitem__(cls, unpacked: Any) -> Any:
            return unpacked
