"""``python -m germline`` is the command ``germline``."""

from germline.cli import main

if __name__ == "__main__":
    main()
