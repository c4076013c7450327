"""Prints the extra that this machine can use: cuda13, cuda12, or nothing without an NVIDIA GPU."""

import ctypes
import sys


def extra() -> str:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    version, devices = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(devices)) or devices.value == 0:
        return ""
    driver.cuDriverGetVersion(ctypes.byref(version))
    major = version.value // 1000
    if major < 12:
        print(
            f"The NVIDIA driver supports CUDA {major}; cufp8 needs one for CUDA 12 or newer "
            "(525 or newer). Going on without the GPU.",
            file=sys.stderr,
        )
        return ""
    return "cuda13" if major >= 13 else "cuda12"


print(extra())
