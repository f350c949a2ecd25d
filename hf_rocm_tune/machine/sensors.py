"""Sensors of amdgpu cards, what a throttle status means, and core dumps that the driver has left."""

from hf_rocm_tune.machine.machine import Sensors
from hf_rocm_tune.machine.resets import core_dumps
from hf_rocm_tune.machine.sensors_sysfs import no_sensors, read_sensors
from hf_rocm_tune.machine.throttle_sysfs import parse_throttle, throttle_causes

__all__ = ["Sensors", "core_dumps", "no_sensors", "parse_throttle", "read_sensors", "throttle_causes"]
