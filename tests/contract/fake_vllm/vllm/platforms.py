"""What vLLM runs on."""

import vllm


class Platform:
    device_type = "tpu"

    def is_cpu(self) -> bool:
        return vllm.MODE != "on a tpu"

    def is_cuda(self) -> bool:
        return False


current_platform = Platform()
