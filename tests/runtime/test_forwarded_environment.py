from __future__ import annotations

from llmrt.runtime.forwarded_environment import forwarded


def test_only_listed_variables_are_forwarded() -> None:
    environ = {f"ODD_{i}": "\n" * i for i in range(200)} | {"PATH": "/x", "RAY_ADDRESS": "y"}
    environ |= {"AWS_SECRET_ACCESS_KEY": "z", "MASTER_ADDR": "w", "LD_PRELOAD": "v"}
    wanted = {"HF_TOKEN": "a", "NCCL_DEBUG": "b", "OMP_NUM_THREADS": "4", "LLMRT_CACHE": "/c"}
    assert forwarded(environ | wanted, {}) == wanted


def test_whose_devices_are_used_is_not_forwarded() -> None:
    assert forwarded({"CUDA_VISIBLE_DEVICES": "3", "CUDA_LAUNCH_BLOCKING": "1"}, {}) == {
        "CUDA_LAUNCH_BLOCKING": "1"
    }


def test_the_users_own_option_goes_whole_and_wins() -> None:
    option = {"HF_TOKEN": "mine", "ANYTHING": "x"}
    assert forwarded({"HF_TOKEN": "theirs"}, option) == option
