"""What torchrun starts in each process for ``slothplug-llamafactory train``.

Alone in its folder, because Python puts the folder of a script in front of all others: a file beside it would hide the
package of its name.
"""

from __future__ import annotations

from slothplug.integrations.llamafactory.command import train

if __name__ == "__main__":
    train()
