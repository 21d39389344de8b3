"""Makes vLLM's server take weights as weight_transfer.py sends them; loaded into the server's workers.

The server is started with --worker-extension-cls extras.openai.vllm_weights.WorkerExtension, which has this module
imported in each worker before the worker makes its weight-transfer engine, and with --weight-transfer-config
'{"backend": …}', which names the engine below.
"""

from contextlib import ExitStack
from typing import Any

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from extras.openai.weight_transfer import BACKEND, read_weights
from workers.weight_sync import sync_class


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
    """Adds to vLLM's workers; naming it has this module imported."""

    def held_checksums(self) -> dict[str, Any] | None:
        """Returns the checksums of the worker's weights, in JSON's types; None: it has none."""
        if (checksums := sync_class().held_by_vllm(self)) is None:
            return None
        dtype, sums = checksums
        return {"dtype": str(dtype).removeprefix("torch."), "sums": sums}


sync_class().prepare_vllm(UnquantizedLinearMethod)
WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryOrNCCL)
