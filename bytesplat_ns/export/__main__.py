"""``python -m bytesplat_ns.export``: the command ``bytesplat-export``."""

from bytesplat_ns.export.command import main

main()
