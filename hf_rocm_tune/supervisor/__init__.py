"""``hf-rocm-tune run -- COMMAND``: watches a training job and starts it again from its newest verified checkpoint.

``command`` says what can be supervised, ``child`` starts and ends processes, ``watch`` sees that they live, ``policy``
decides, ``loop`` puts it together. Nothing here imports torch: what watches must not die of what it watches for.
"""
