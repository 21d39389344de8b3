"""Makes vLLM's server take weights as weight_transfer.py sends them; loaded into the server's workers.

The server is started with --worker-extension-cls workers.openai.vllm_weights.WorkerExtension, which has this module
imported in each worker before the worker makes its weight-transfer engine, and with --weight-transfer-config
'{"backend": …}', which names the engine below.
"""

from contextlib import ExitStack
from typing import Any

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from workers.openai.shared_weights import BACKEND, read_weights


class SharedMemoryOrNCCL(NCCLWeightTransferEngine):
    """vLLM's engine for NCCL, which also takes weights from a folder, if an update names one."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads the weights of {"folder": …}, or those that are broadcast.

        Raises:
            ValueError: the model has no place for one; it is whole again, of old weights and of new.
            FileNotFoundError: there are none in the folder.
        """
        with ExitStack() as failed:
            failed.callback(self.finish_weight_update)
            if "folder" in update_info:
                self.model.load_weights(read_weights(update_info["folder"]))
            else:
                super().update_weights(update_info)
            failed.pop_all()


class WorkerExtension:
    """Adds nothing to vLLM's workers: it is named to have this module imported."""


WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryOrNCCL)
