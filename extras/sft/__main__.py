"""Trains a model to imitate rows, as a warm start or for good: python -m extras.sft key=value …"""

from configs.loader import command
from extras.sft.settings import SFTConfig, check_early, check_sft

main = command("sft", SFTConfig, check_sft, __doc__, "extras.sft.trainer.start", check_early)
if __name__ == "__main__":
    raise SystemExit(main())
