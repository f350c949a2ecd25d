# hf_rocm_tune for a Radeon card. The wheels of torch carry ROCm; the kernel's driver stays on the host. How to run it:
# docs/install.md. python3-dev and gcc are for Triton, which compiles its driver against Python's headers at first use.
FROM ubuntu:24.04
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
       ca-certificates gcc libc6-dev make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/hf_rocm_tune
COPY . .
RUN HF_ROCM_TUNE_TORCH=rocm7.2 make setup
ENV PATH=/opt/hf_rocm_tune/.venv/bin:$PATH
WORKDIR /work
